"""Calls that a compiled graph does not answer, and the original does: the other side of a branch on sizes,
another flag, another element type. Each kind becomes a program of its own, captured when it is first met;
torch answers that first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends.cpu import threads
from aerogel.capture.fuse import fuse
from aerogel.capture.half import Half
from aerogel.capture.network import Network
from aerogel.errors import AerogelError, ShapeError, UnsupportedModel
from aerogel.ir import GRAPH, Plan
from aerogel.locks import Lock
from aerogel.runtime.eager import alike, memory_of, unshared

if TYPE_CHECKING:
    from aerogel.runtime.module import Compiled

NO_TRAINING = (
    "a compiled module cannot train: an input requires grad. Fine-tune the original, then compile again."
)
MOST_PROGRAMS = 8
"""Of one model, the first included."""
ASK_AGAIN = "Compile the model again with an example like this call; a file answers what it was captured for"


class Others:
    """The further programs of one compiled module. They are made anew in copies and other processes."""

    def __init__(self, make: Callable[..., Compiled]) -> None:
        self._make = make
        self._made: list[Compiled] = []
        self._refused = set[str]()
        self._lock = Lock()
        self._warned = False

    def answer(self, first: Compiled, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str) -> Any:
        """The answer to a call that `first` does not take, for the reason `why`."""
        threads.settle()
        for other in self._made:
            if _takes(other, args, kwargs):
                return other(*args, **kwargs)
        if first.is_graph:
            raise ShapeError(f"{why}. {ASK_AGAIN}")
        if torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves((args, kwargs))
        ):
            raise AerogelError(NO_TRAINING)
        try:
            with torch.no_grad():
                wanted = unshared(first.original(*args, **kwargs), memory_of(first.original))
        except Exception as error:  # whatever the model itself raises
            raise not_taken(why, error) from error
        with self._lock:
            if _kind(args, kwargs) not in self._refused and not any(
                _takes(other, args, kwargs) for other in self._made
            ):
                self._add(first, args, dict(kwargs), wanted, why)
        return wanted

    def _add(
        self, first: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Any, why: str
    ) -> None:
        if len(self._made) + len(self._refused) + 1 >= MOST_PROGRAMS:
            self._warn(f"calls of more than {MOST_PROGRAMS} kinds ({why})")
            return
        try:
            network, plan = again(first, args, kwargs)
            made = self._make(first.original, network, plan, GRAPH, backend=first.backend)
            if not made.runs(network.captured.flat(args, kwargs)):  # calling it would look for others in turn
                raise UnsupportedModel("the graph does not take them")
            if not alike(wanted, made(*args, **kwargs)):
                raise UnsupportedModel("the answer differs from torch's")
            self._made.append(made)
        except (AerogelError, RuntimeError) as reason:
            self._refused.add(_kind(args, kwargs))
            self._warn(f"calls like this one ({why}; {reason})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"torch runs {what}: right, but not faster", stacklevel=6)


def not_taken(why: str, error: Exception) -> ShapeError:
    """What to say where the model itself does not take a call, for its own reason."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ShapeError(f"{why}; and the model itself does not take this call: {said[:200]}")


def again(first: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Network, Plan]:
    """The model captured with this call, under the choices of `first` where it has the same layers."""
    from aerogel.capture.export import capture  # costs a second that a loaded model may never need

    assert first.network is not None
    model, ((args, kwargs),) = first.backend.host(first.original, [(args, kwargs)])
    captured = capture(model, args, kwargs)
    graph, constants, _ = fuse(captured.graph, captured.constants, captured.shapes, captured.types)
    # the same once fused is not enough: numbers of the graph may have been folded into its weights
    like = first.network if captured.graph == first.network.captured.graph else None
    network, half = Network(captured, graph, constants, like=like), first.network.half
    if half is not None:
        network.shapes(network.captured.flat(args, kwargs))
        network = network.halved(Half(half.dtypes, network.stored, half.stay), like)
    known = {(c.layer, c.conv.layer()): c for c in first.plan.choices}
    choices = []
    for node in network.convs():
        assert node.conv is not None
        choice = known.get((node.layer or node.name, node.conv))
        if choice is not None:
            choices.append(replace(choice, node=node.name, pooled=False))
    return network, replace(first.plan, choices=tuple(choices), image_by_image=False)


def _takes(other: Compiled, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    assert other.network is not None
    try:
        return other.misfit(other.network.captured.flat(args, kwargs)) is None
    except ShapeError:
        return False


def _kind(args: Any, kwargs: Any) -> str:
    """Calls that differ only in the values of their tensors are of one kind."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return f"{spec} {[(v.shape, v.dtype) if isinstance(v, torch.Tensor) else repr(v)[:200] for v in leaves]}"
