"""Formats of the house: how several methods store weights, and what a kernel is told of them."""
