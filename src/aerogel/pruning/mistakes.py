"""What people hand to prune() and its kin by mistake, and the sentence each gets: what it is, and what to
do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import nn

from aerogel.errors import AerogelError, InvalidArgument

MOST_NAMES = 12
"""Layers that a sentence lists."""


def a_module(model: Any, call: str) -> nn.Module:
    """The model, if it is a module whose layers can be seen and changed. `call` is the function that was
    called."""
    given, why = type(model).__name__, ""
    if isinstance(model, torch.jit.ScriptModule):
        why = "it is a torch.jit module, whose layers are no longer modules. Give the model it was made from"
    elif isinstance(model, nn.Module):
        if not (hasattr(type(model), "original") and hasattr(model, "plan")):
            return model
        why = (
            "it is compiled, and stays as it is. Give the model it was compiled from (its .original), "
            "then compile again"
        )
    elif isinstance(model, type) and issubclass(model, nn.Module):
        given, why = f"class {model.__name__}", f"make one first: {call}({model.__name__}(), ...)"
    elif isinstance(model, str | PathLike):
        why = "a path is no module. On the command line, aerogel advise and aerogel prune read files"
    elif isinstance(model, Mapping):
        why = "a state is no model. Build the module, call its load_state_dict(), and give the module"
    elif callable(model):
        why = "a function has no layers. Give the nn.Module that holds them"
    raise InvalidArgument(f"{call}() takes a torch.nn.Module, not a {given}" + (f": {why}." if why else "."))


def a_share(value: Any, what: str, *, zero: bool = False) -> float:
    """A number between 0 and 1; with `zero`, 0 counts."""
    number = real(value)
    if 0 < number < 1 or (zero and number == 0):
        return number
    percent = f": for {number:g} % say {number / 100:g}" if 1 < number < 100 else ""
    raise InvalidArgument(
        f"{what} is a share {'from 0 to less than 1' if zero else 'between 0 and 1'}, not {value!r}{percent}"
    )


def real(value: Any) -> float:
    """A number as a float, numpy's too; NaN for whatever is none, True and False among it."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def a_count(value: Any, what: str) -> int:
    """A whole number from 1 on."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise InvalidArgument(f"{what} is a whole number of at least 1, not {value!r}")


def a_speedup(value: Any) -> float | None:
    """None, or how many times as fast."""
    if value is None:
        return None
    if 0 < real(value) < math.inf:
        return real(value)
    raise InvalidArgument(f"speedup is how many times as fast the model shall be, such as 2.0, not {value!r}")


def several(value: Any, what: str, example: str) -> list[Any]:
    """The items of a list; a bare item is a mistake, for it can often be iterated over too."""
    return list(walkable(value, what, example))


def walkable(value: Any, what: str, example: str) -> Iterable[Any]:
    """The same, not read yet."""
    bare = isinstance(value, str | bytes | Mapping | Real | torch.Tensor | nn.Module)
    if bare or hasattr(value, "__array__") or not isinstance(value, Iterable):
        wrap = " Put it into a list: [tensor]." if isinstance(value, torch.Tensor) else ""
        raise InvalidArgument(
            f"{what} must be a list, for example {example}; got a {type(value).__name__}.{wrap}"
        )
    return value


def a_score(evaluate: Any) -> Any:
    """`evaluate` as given, or the sentence that it is no function."""
    if evaluate is None or callable(evaluate):
        return evaluate
    raise InvalidArgument(
        "evaluate is a function of the model, giving a number that is higher when better; not a "
        f"{type(evaluate).__name__}"
    )


def a_number(found: Any) -> float:
    """What `evaluate` gave."""
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgument(
            f"evaluate(model) gave {str(found)[:80]}; it must give a finite number, higher when better"
        )
    return number


def no_layer(name: Any, layers: Collection[str]) -> AerogelError:
    """A name that no layer has: the nearest that there is, those within a block of that name, or all."""
    inside = [n for n in layers if isinstance(name, str) and name and n.startswith(f"{name}.")]
    near = get_close_matches(str(name), layers, 1)
    if inside:
        hint = f"it holds {_listed(inside)}: name those"
    elif near:
        hint = f"did you mean '{near[0]}'?"
    else:
        hint = f"it has {_listed(layers) or 'none'}"
    return AerogelError(f"'{name}' is no convolution or Linear of the model; {hint}")


def _listed(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:MOST_NAMES])
    return first + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
