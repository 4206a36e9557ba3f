"""What is measured: architectures, and real pruning masks."""
