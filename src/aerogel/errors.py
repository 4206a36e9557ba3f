"""The exceptions a user can meet. Each message names the thing and the remedy.

AerogelError
├── UnsupportedModel   a layer or model aerogel cannot take, and what to do instead
├── InvalidFile        a file or string that is not what it claims to be
├── PlanMismatch       a plan made for another machine, thread count or layout
└── ShapeError         sizes that do not fit, are missing or overflow
"""


class AerogelError(Exception):
    """Anything aerogel refuses to do."""


class UnsupportedModel(AerogelError):
    """The model or layer asks for something no method covers."""


class InvalidFile(AerogelError):
    """Text or bytes from outside do not parse."""


class PlanMismatch(AerogelError):
    """A decision made for one machine or layout is used with another."""


class ShapeError(AerogelError):
    """Sizes disagree, are missing, or are too large to address."""
