"""From a graph and a choice for each convolution to a list of kernels and torch calls."""
