"""Code generation, by what the code computes: `rows` (sparse filters), `segment` (lists of kernels); `llvm` makes machine code."""
