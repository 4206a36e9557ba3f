"""Real pruning masks; the architectures are aerogel.zoo's."""
