"""`direct`: each nonzero weight is one broadcast times a shifted window of x. No lowering, no im2col.

Paper: Escort (Chen, arXiv 1802.10280), whose filters in CSR over flattened (c, r, s) are "stretched" when a
kernel is built for one image size: the position becomes the offset of its window in the padded input. What is
packed stays (c, r, s).

With `aligned`, a row's nonzeros are sorted by the lane at which their windows start when a kernel is built
(see codegen/cpu/rows.py); formats/flat.py has the format.

Wins for unstructured weights from about two thirds zeros; a row of equal lengths lets the branch predictor
learn the loop's end, hence the order. Refuses: half precision the CPU lacks, and images too large for 32-bit
offsets.
"""

NAME = "direct"
PAPER = "Escort, arXiv 1802.10280"
SUMMARY = "one broadcast and one shifted window of the input for each nonzero weight; unstructured sparsity"
SKIPS_INPUT = False
RANK = 2
DEMANDS = "aligned"
ROUNDING = "channels"
NOT_ON: dict[str, str] = {}
