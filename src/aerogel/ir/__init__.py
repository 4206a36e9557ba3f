"""The nouns that every room passes around: Conv, element types, layouts, graphs, targets, statistics,
plans."""
