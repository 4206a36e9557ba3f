"""`quads`: int8, four channels at a time. A block of four weights meets four channels of 16 pixels in one
instruction.

A pixel of four channels is one 32-bit lane of x, and a block of weights (1 filter x 4 input channels, pattern
"1x4" of `prune`) one 32-bit number that is spread over all lanes:

    x        [c / 4][plane] of  c0 c1 c2 c3         unsigned bytes
    value    w0 w1 w2 w3                            signed bytes, one block that is not empty
    sum      += c0 w0 + c1 w1 + c2 w2 + c3 w3       32 bits, exact: `vpdpbusd` where the CPU has it

Four filters make the four channels of a pixel of y. Masks that are not in blocks run too: a block with one
nonzero costs as much as a full one.

Packed, for each block of channels, filter after filter:

    start    [0, 5, 7, 11, ...       where a filter's narrow blocks begin and its wide ones, in turn
    position [...]                   (c / 4 * R + r) * S + s
    value    [...]                   four bytes
    group    [0, 4, 8]               units of work that threads share, in quads of filters

In a narrow block no pair of products can reach past 16 bits, which CPUs without the instruction sum faster.

Paper: none of the five; the form is that of oneDNN's and XNNPACK's dense int8, with empty blocks left out.
Wins where the model runs in int8 (`compile(dtype="int8")`). Refuses floats, and kernels of more than 32,896
weights a filter, whose sums might not fit.
"""

NAME = "quads"
PAPER = "int8 in 1x4 blocks"
SUMMARY = "blocks of four input channels in int8, one instruction for four products of 16 pixels"
SKIPS_INPUT = False
RANK = 1
DEMANDS = None
ROUNDING = None
NOT_ON = {"gpu": "int8 runs on CPUs only"}
