"""aerogel: pruned CNNs, really faster. Same answers, never slower on your machine, and it says why.

Public names; `docs/api.md` is the contract. What is not listed here may change.
"""

from aerogel.errors import AerogelError, InvalidFile, PlanMismatch, ShapeError, UnsupportedModel

__version__ = "0.1.0"
__all__ = ["AerogelError", "InvalidFile", "PlanMismatch", "ShapeError", "UnsupportedModel", "__version__"]
