"""`aerogel::run`: a compiled module as one operator, the form that torch.compile and torch.export see.

Tracing stops at it: the module's sizes are computed on fake tensors by the same graph that runs. A module is
named by a number that lives as long as the process; an exported program that holds one is for this process.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_SCHEMA = "(Tensor[] inputs, SymInt module) -> Tensor[]"
"""Written out, because torch 2.6 cannot infer it from `list[torch.Tensor]`."""


def register(module: Any) -> int:
    """A number for a module that has `run_flat(inputs)` and `fake_flat(inputs)`, both giving a list of
    tensors."""
    number = next(_numbers)
    _modules[number] = module
    return number


@torch.library.custom_op("aerogel::run", mutates_args=(), schema=_SCHEMA)
def run(inputs: list[torch.Tensor], module: int) -> list[torch.Tensor]:
    """Run a compiled module on the tensors of a call."""
    found: list[torch.Tensor] = _modules[module].run_flat(inputs)
    return found


@run.register_fake
def _(inputs: list[torch.Tensor], module: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = _modules[module].fake_flat(inputs)
    return found
