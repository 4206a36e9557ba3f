"""Code generation, by what the code computes: `rows` (sparse filters), later tiles and pooling; `llvm` turns IR into machine code."""
