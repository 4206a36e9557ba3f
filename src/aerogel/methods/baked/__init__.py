"""`baked`: the nonzeros of a layer are the instructions of its kernel.

A vector of 16 pixels of x is loaded once and meets every filter that has a nonzero there: the sums of up to
28 filters stand in registers, and each nonzero is one FMA whose register and whose window are written into
the code. Only values are data.

    zmm28 = x[channel 0, tap 3]
    zmm4  += zmm28 * value[0]           filter 4 has a nonzero there
    zmm17 += zmm28 * value[1]           and so has filter 17
    zmm29 = x[channel 0, tap 5]
    ...

`direct` loads x anew for each nonzero, and most of its loads straddle cache lines or come from beyond the
first cache. Here most loads are of four bytes that follow each other. The price is code, about ten bytes a
nonzero: the more pixels run through it the better. Wins most at 70 to 90 % zeros, on 3x3 kernels and wide
layers. Refuses CPUs without AVX-512, half precision, fewer than eight filters, and half a million nonzeros.

Paper: none of the five. LIBXSMM (SC'16) writes such code for small sparse matrices; on GPUs `stridepack` has
a form of it.

Packed, for each group of filters and block of channels, in sets of filters that stand in registers together:

    group    [0, 26, 52]             filters 0-25 and 26-51 are units of work that threads share
    start    [0, 71, ...             where the nonzeros of each (group, block, set) begin
    register [4, 17, ...             which filter of the set
    position [3, 3, 5, ...           (c * R + r) * S + s within the block, in two bytes, ascending
    value    [...]
"""

NAME = "baked"
PAPER = "kin of LIBXSMM, SC'16"
SUMMARY = "the nonzeros are the kernel's instructions, and a vector of the input serves many filters"
SKIPS_INPUT = False
RANK = 4
DEMANDS = None
ROUNDING = "channels"
NOT_ON = {"gpu": "written for CPUs with AVX-512; on GPUs stridepack has a form with the weights in the code"}
