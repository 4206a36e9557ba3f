"""How it is measured and told: opponents, the core's own limits, promises, tables."""
