"""This machine's CPU."""
