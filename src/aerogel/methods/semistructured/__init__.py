"""`semistructured`: two of four weights are kept, and the tensor cores of NVIDIA's GPUs since Ampere skip the
others.

Of every four neighbouring input channels at most two have a weight (`prune(pattern="2:4")`). What is left of
a row is half as long, and two bits for each value say where it stood:

    weight    [ a 0 0 b   0 c d 0   0 0 e 0 ]
    value     [ a b       c d       e 0     ]
    index     [ 0 3       1 2       2 3     ]

The product is torch's own (`torch.sparse.SparseSemiStructuredTensorCUTLASS`): aerogel packs, and hands the
values and the indices, in CUTLASS's order, to it. **The product has never run**: nobody who wrote this had a
GPU. The values and indices are checked on the CPU: bit for bit against torch's own conversion, and that they
unpack to the weight.

Paper: none of the five; Mishra et al., Accelerating Sparse Deep Neural Networks, arXiv 2104.08378. For 1x1
convolutions and Linear in f16 and bf16. Refuses CPUs, GPUs that are not of compute capability 8.x, for which
torch has these kernels, other kernel sizes, f32, weights with more than two of four, and channels that are no
multiple of 64.
"""

NAME = "semistructured"
PAPER = "2:4 sparsity, arXiv 2104.08378"
SUMMARY = "two of four weights on the tensor cores of Ampere GPUs, by torch's own kernels"
SKIPS_INPUT = False
RANK = None
DEMANDS = None
ROUNDING = None
NOT_ON = {"cpu": "two of four weights are skipped by the tensor cores of GPUs only"}
