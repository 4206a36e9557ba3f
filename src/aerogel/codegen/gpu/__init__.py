"""Kernels for GPUs: sources in a dialect that CUDA and OpenCL both compile (dialect.h), and what it takes to
launch them."""
