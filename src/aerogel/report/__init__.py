"""What a person reads: `explain`."""
