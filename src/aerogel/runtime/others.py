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
from aerogel.capture.copies import shallow_copy
from aerogel.capture.fuse import fuse
from aerogel.capture.half import Half
from aerogel.capture.network import Network
from aerogel.errors import AerogelError, ShapeError, UnsupportedModel
from aerogel.ir import GRAPH, Plan
from aerogel.locks import Lock
from aerogel.runtime.eager import alike, memory_of, unshared
from aerogel.runtime.reading import first_line

if TYPE_CHECKING:
    from aerogel.runtime.module import Compiled

NO_TRAINING = (
    "a compiled module cannot train: an input requires grad. Fine-tune the original, then compile again."
)
MAX_PROGRAMS = 64  # of one model, the first included: more kinds of calls than any model has branches
MAX_FAILED_CAPTURES = 4  # in a row; then torch runs further kinds of calls without another attempt
ASK_AGAIN = "Compile the model again with an example like this call; a file answers what it was captured for"


class Others:
    """The further programs of one compiled module. They are made anew in copies and other processes."""

    def __init__(self, make: Callable[..., Compiled]) -> None:
        self._make = make
        self._made: list[Compiled] = []
        self._refused = set[str]()
        self._failed = 0  # captures in a row
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
        tries = self._tries(args, kwargs)
        # a copy: what the model caches for this call must not be what it is captured with
        model = shallow_copy(first.original) if tries else first.original
        try:
            with torch.no_grad():
                wanted = unshared(model(*args, **kwargs), memory_of(first.original))
        except Exception as error:  # whatever the model itself raises
            raise not_taken(why, error) from error
        if tries:
            with self._lock:
                if self._tries(args, kwargs) and not any(_takes(other, args, kwargs) for other in self._made):
                    self._add(first, args, dict(kwargs), wanted, why)
        return wanted

    def _tries(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call that no program takes is worth a capture."""
        return self._failed < MAX_FAILED_CAPTURES and _kind(args, kwargs) not in self._refused

    def forget(self) -> None:
        """Give back the memory of all programs' sizes; the programs themselves stay."""
        for program in self._made:
            program.forget()

    def _add(
        self, first: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Any, why: str
    ) -> None:
        if len(self._made) + 1 >= MAX_PROGRAMS:
            self._failed = MAX_FAILED_CAPTURES
            self._warn(f"calls of more than {MAX_PROGRAMS} kinds, such as {_drawn(first, args, kwargs)}")
            return
        try:
            network, plan = again(first, args, kwargs)
            made = self._make(first.original, network, plan, GRAPH, backend=first.backend)
            made.ready().share_memory(first.ready())
            if not made.runs(network.captured.flat(args, kwargs)):  # calling it would look for others in turn
                raise UnsupportedModel("the graph captured for them does not run")
            if not alike(wanted, made(*args, **kwargs)):
                raise UnsupportedModel("the answer of the graph captured for them differs from torch's")
        except (AerogelError, RuntimeError) as reason:
            self._refused.add(_kind(args, kwargs))
            self._failed += 1
            self._warn(f"calls like {_drawn(first, args, kwargs)} ({first_line(reason)})")
        else:
            self._failed = 0
            self._made.append(made)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"torch runs {what}: right, but not faster", stacklevel=6)


def _drawn(first: Compiled, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Draw a call with the sizes of its tensors, as `f(x=1x3x160x160)`."""
    sizes = [
        "x".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        for value in pytree.tree_leaves((args, dict(kwargs)))
    ]
    if len(sizes) == len(first.input_names):
        sizes = [f"{name}={size}" for name, size in zip(first.input_names, sizes, strict=True)]
    return f"f({', '.join(sizes)})"[:200]


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
    like = first.network
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
