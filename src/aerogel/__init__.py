"""aerogel: pruned CNNs, really faster. Same answers, never slower on your machine, and it says why.

Public names. What is not listed here may change.
"""

from typing import TYPE_CHECKING, Any

from aerogel.errors import AerogelError, InvalidFile, PlanMismatch, ShapeError, UnsupportedModel

if TYPE_CHECKING:
    from aerogel.compiler import compile as compile
    from aerogel.ir import Plan as Plan
    from aerogel.pruning.advice import Advice as Advice
    from aerogel.pruning.advise import advise as advise
    from aerogel.pruning.boost import Boosted as Boosted
    from aerogel.pruning.boost import boost as boost
    from aerogel.pruning.heal import heal as heal
    from aerogel.pruning.held import finalize as finalize
    from aerogel.pruning.prune import prune as prune
    from aerogel.pruning.reprune import reprune as reprune
    from aerogel.pruning.repruned import Repruned as Repruned
    from aerogel.pruning.schedule import Schedule as Schedule
    from aerogel.pruning.slim import slim as slim
    from aerogel.pruning.slimmed import Slimmed as Slimmed
    from aerogel.report.explain import explain as explain
    from aerogel.report.report import Report as Report
    from aerogel.runtime.module import Compiled as Compiled
    from aerogel.runtime.onnxmodel import OnnxModel as OnnxModel
    from aerogel.saved.file import load as load
    from aerogel.saved.file import save as save

__version__ = "0.2.0"
_LATER = {
    "advise": "aerogel.pruning.advise",
    "Advice": "aerogel.pruning.advice",
    "boost": "aerogel.pruning.boost",
    "Boosted": "aerogel.pruning.boost",
    "Plan": "aerogel.ir",
    "reprune": "aerogel.pruning.reprune",
    "Repruned": "aerogel.pruning.repruned",
    "compile": "aerogel.compiler",
    "Compiled": "aerogel.runtime.module",
    "OnnxModel": "aerogel.runtime.onnxmodel",
    "explain": "aerogel.report.explain",
    "Report": "aerogel.report.report",
    "save": "aerogel.saved.file",
    "load": "aerogel.saved.file",
    "prune": "aerogel.pruning.prune",
    "finalize": "aerogel.pruning.held",
    "heal": "aerogel.pruning.heal",
    "Schedule": "aerogel.pruning.schedule",
    "slim": "aerogel.pruning.slim",
    "Slimmed": "aerogel.pruning.slimmed",
}
__all__ = [
    "Advice", "AerogelError", "Boosted", "Compiled", "InvalidFile", "OnnxModel", "Plan", "PlanMismatch",
    "Report", "Repruned", "Schedule", "ShapeError", "Slimmed", "UnsupportedModel", "__version__", "advise",
    "boost", "compile", "explain", "finalize", "heal", "load", "prune", "reprune", "save", "slim",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs torch is loaded when it is first used: kernels of ours do not."""
    if name not in _LATER:
        raise AttributeError(f"module 'aerogel' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """The public names, and only them."""
    return sorted(__all__)
