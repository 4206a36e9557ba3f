"""Running compiled work: torch's thread pool and native segments."""
