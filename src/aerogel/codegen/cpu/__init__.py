"""Emitters of LLVM IR, one a file. `abi` is what they and their callers agree on, `llvm` makes machine
code."""
