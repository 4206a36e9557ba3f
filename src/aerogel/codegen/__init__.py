"""How code is made, by what it computes: `cpu` through LLVM, `gpu` as source that CUDA and OpenCL take."""
