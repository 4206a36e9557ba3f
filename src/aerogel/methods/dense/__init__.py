"""`dense`: the strongest dense convolution torch offers. It is a member of the choice set, not a fallback.

Four candidates: both memory layouts, plain `torch.conv2d` or oneDNN with the weight reordered once and bias,
activation and residual add fused, through the ops that inductor's freezing uses. Those are private: where
this torch lacks one, the plain form remains. Wins below about two thirds zeros, and where a layer is too
small for anything to matter.

Packed: the weight as it is.
"""

NAME = "dense"
PAPER = "torch and oneDNN"
SUMMARY = (
    "torch's own convolution: both layouts, plain or oneDNN with the weight reordered and the epilogue fused"
)
SKIPS_INPUT = False
RANK = None
DEMANDS = None
ROUNDING = None
NOT_ON: dict[str, str] = {}
