"""GPUs: the same launches on CUDA tensors or in OpenCL buffers."""
