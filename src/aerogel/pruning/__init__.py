"""Masks and schedules: which weights go, and how they stay gone while a model trains."""
