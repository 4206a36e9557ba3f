"""`actsparse`: skips the zeros of the feature map instead of the weights'; needs no pruning.

Paper: TACO'23 (doi 10.1145/3600092, arXiv 1909.09927). Its ECR compresses the feature map once and lets all
filters consume it. Here what is skipped is a vector or two of pixels of one channel under one tap: where ReLU
left it zero, no filter reads it or its weights (codegen/cpu/lists.py). Weights that are zero as well (both
sparse) go where a whole panel of filters has none.

Wins where ReLU leaves regions or whole channels empty. Only real inputs can tell: without
`compile(calibration=...)` it refuses. Refuses too where few vectors are zero, and sums in fp16. A zero of x
hides a weight that is infinite or no number.
"""

NAME = "actsparse"
PAPER = "TACO'23, arXiv 1909.09927"
SUMMARY = "skips vectors of pixels that ReLU left zero (ECR); needs calibration inputs, no pruning"
SKIPS_INPUT = True
RANK = None
DEMANDS = None
ROUNDING = "channels"
NOT_ON: dict[str, str] = {}
