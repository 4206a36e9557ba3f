"""Well-known architectures with seeded weights, to time without a model of one's own."""
