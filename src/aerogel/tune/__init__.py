"""Measuring and choosing: `measure` times, nothing else; policy and persistence have files of their own."""
