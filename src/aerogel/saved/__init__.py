"""The .aero file: a compiled model on disk."""
