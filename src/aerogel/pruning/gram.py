"""What layers are given and what they should answer, as sums over pixels: all that least squares needs.

A layer's answer is its matrix of weights times its patches. Of each image some pixels are picked, always the
same; their patches x and the dense network's answers y there make

    gram  = sum of x x'    positions x positions, for each group
    cross = sum of y x'    filters x positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.pruning.layers import columns, filters_first, groups, results, windows
from aerogel.runtime.eager import Call

PIXELS, EACH = 1 << 14, 16
"""Pixels that are picked in all, and of each image at least."""
MOST_BYTES = 384 << 20
"""Sums that are held at once."""

Taken = Callable[[int, Tensor, Tensor], None]
"""Called with the number of the call, what a layer was given, and what it answered."""


@dataclass
class Sums:
    """Of one layer."""

    gram: Tensor
    cross: Tensor

    @staticmethod
    def zeros(module: nn.Module) -> Sums:
        weight: Any = module.weight
        k, n = filters_first(module, weight).flatten(1).shape
        many = groups(module)
        gram, cross = torch.zeros(many, n, n).double(), torch.zeros(many, k // many, n).double()
        return Sums(gram, cross)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Patches (groups x pixels x positions) and answers (pixels x filters)."""
        x, y = x.double(), y.double().reshape(len(y), len(self.gram), -1).transpose(0, 1)
        self.gram += x.mT @ x
        self.cross += y.mT @ x


class Pick:
    """Which pixels of each call are looked at: the same whoever asks."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._images = max(1, sum(images(call) for call in calls))

    def of(self, number: int, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Indices into the leading dimensions of a layer's windows."""
        pixels = torch.Size(shape).numel()
        each = max(EACH, -(-PIXELS // self._images))
        random = torch.Generator().manual_seed(number)
        some = torch.randperm(pixels, generator=random)[: shape[0] * each].sort().values
        return torch.unravel_index(some, tuple(shape))

    def patches(self, module: nn.Module, number: int, x: Tensor) -> Tensor:
        """What the picked pixels are made of: groups x pixels x positions."""
        seen = windows(module, x.detach())
        weight: Any = module.weight
        return columns(module, seen[self.of(number, seen.shape[: seen.dim() - weight.dim() + 1])])

    def answers(self, module: nn.Module, number: int, y: Tensor) -> Tensor:
        """What a layer answers there: pixels x filters."""
        found = results(module, y.detach())
        return found[self.of(number, found.shape[:-1])]


def images(call: Any) -> int:
    """Images of a call, or of what will be one."""
    return next((t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim()), 1)


class _Enough(BaseException):
    """Everything was seen: the rest of the network need not run."""


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def watched(
    model: nn.Module, takers: Mapping[nn.Module, Taken], calls: Iterable[Call], last: int | None = None
) -> None:
    """Run the model on the calls and show takers what their layers are given and answer; after `last` of
    them in a call, it is stopped."""
    seen = now = 0

    def hook(module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        nonlocal seen
        takers[module](now, args[0] if args else kwargs["input"], y)
        seen += 1
        if seen == last:
            raise _Enough

    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in takers]
    try:
        with inference(model):
            for number, (args, kwargs) in enumerate(calls):
                seen, now = 0, number
                try:
                    model(*args, **kwargs)
                except _Enough:
                    continue
    finally:
        for one in hooks:
            one.remove()


def order(model: nn.Module, modules: Mapping[str, nn.Module], call: Call) -> list[str]:
    """The layers that run, in the order in which they do."""
    found: dict[str, None] = {}

    def taken(name: str) -> Taken:
        return lambda *_: found.setdefault(name)

    try:
        watched(model, {module: taken(name) for name, module in modules.items()}, [call])
    except Exception as why:
        raise InvalidArgument(
            f"the model does not run on its first calibration input: {type(why).__name__} {str(why)[:200]}. "
            "A loader of (images, labels) gives images alone as [x for x, _ in loader]."
        ) from why
    return list(found)


def targets(
    dense: nn.Module, modules: Mapping[str, nn.Module], calls: Sequence[Call]
) -> dict[str, list[Tensor]]:
    """What each layer of the dense network answers at the picked pixels, call by call."""
    pick, found = Pick(calls), {name: list[Tensor]() for name in modules}

    def taken(name: str, module: nn.Module) -> Taken:
        return lambda number, _, y: found[name].append(pick.answers(module, number, y))

    watched(dense, {module: taken(name, module) for name, module in modules.items()}, calls)
    return found


def gathered(model: nn.Module, module: nn.Module, wanted: Sequence[Tensor], calls: Sequence[Call]) -> Sums:
    """The sums of a layer: what it is given in the model as it is now, and what it should answer."""
    pick, sums, left = Pick(calls), Sums.zeros(module), iter(wanted)

    def taken(number: int, x: Tensor, _: Tensor) -> None:
        sums.add(pick.patches(module, number, x), next(left))

    watched(model, {module: taken}, calls, len(wanted) // len(calls))
    return sums


def own(dense: nn.Module, modules: Mapping[str, nn.Module], calls: Sequence[Call]) -> dict[str, Sums]:
    """The sums of layers in the dense network itself."""
    pick, found = Pick(calls), {name: Sums.zeros(module) for name, module in modules.items()}

    def taken(sums: Sums, module: nn.Module) -> Taken:
        def add(number: int, x: Tensor, y: Tensor) -> None:
            sums.add(pick.patches(module, number, x), pick.answers(module, number, y))

        return add

    watched(dense, {module: taken(found[name], module) for name, module in modules.items()}, calls)
    return found


def parts(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Layers in portions whose sums can be held at once."""
    held, size = dict[str, nn.Module](), 0
    for name, module in modules.items():
        weight: Any = module.weight
        k, n = filters_first(module, weight).flatten(1).shape
        bytes_ = 8 * n * (n * groups(module) + k)
        if held and size + bytes_ > MOST_BYTES:
            yield held
            held, size = {}, 0
        held[name] = module
        size += bytes_
    if held:
        yield held
