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
from aerogel.pruning.layers import columns, filters_first, groups, owned_once, results, windows
from aerogel.runtime.eager import Call, images
from aerogel.runtime.reading import type_remedy

PIXELS, EACH = 1 << 14, 16
"""Pixels that are picked in all, and of each image at least."""
MOST_BYTES = 384 << 20
"""Sums that are held at once."""
AT_ONCE = 1 << 11
"""Pixels whose patches are added up together."""
LABELS = "A loader of (images, labels) gives images alone as [x for x, _ in loader]."
"""What is wrong with most calibration that a model refuses."""
LOOKED_AT, ROUNDING = 64, 0.02
"""Pixels by which a layer's answer is compared to a product, and how far it may be off: bf16 rounds so."""

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
        x, y = x.cpu(), y.cpu()
        y = y.double().reshape(len(y), len(self.gram), -1).transpose(0, 1)
        for some, own in zip(torch.split(x, AT_ONCE, 1), torch.split(y, AT_ONCE, 1), strict=True):
            some = some.double()
            self.gram.baddbmm_(some.mT, some)
            self.cross.baddbmm_(own.mT, some)

    def checked(self, name: str) -> Sums:
        """Themselves, where they are numbers: no sum of products is larger than the sums of squares."""
        if self.gram.diagonal(dim1=1, dim2=2).isfinite().all() and self.cross.isfinite().all():
            return self
        raise InvalidArgument(
            f"'{name}' is given, or answers, NaN or infinity on calibration: take such inputs away, or prune "
            "the model in float32"
        )


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


class _Enough(BaseException):
    """Everything was seen: the rest of the network need not run."""


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, each call on copies of its inputs, which some models change; afterwards as it
    was."""
    modes = {module: module.training for module in model.modules()}
    hook = model.register_forward_pre_hook(_copied, with_kwargs=True)
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode


def _copied(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))


def watched(
    model: nn.Module,
    takers: Mapping[nn.Module, Taken],
    calls: Iterable[Call],
    last: Sequence[int] | None = None,
) -> None:
    """Run the model on the calls and show takers what their layers are given and answer; after the `last` of
    a call, that call is stopped."""
    seen = now = 0

    def hook(module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        nonlocal seen
        takers[module](now, args[0] if args else kwargs["input"], y)
        seen += 1
        if last is not None and seen == last[now]:
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


def _watched_first(model: nn.Module, takers: Mapping[nn.Module, Taken], call: Call) -> None:
    """Run the first call, and say what to do where the model refuses it."""
    try:
        watched(model, takers, [call])
    except Exception as why:
        raise InvalidArgument(
            f"the model does not run on its first calibration input: {type(why).__name__} {str(why)[:200]}. "
            + (type_remedy(model, call, "the input") or LABELS)
        ) from why


def check_first(model: nn.Module, call: Call) -> None:
    """Raise where the model does not run on the first call, or where that is one image without a batch, which
    torch runs too: its channels would count as images."""
    single: list[int] = []
    convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]

    def taken(module: Any) -> Taken:
        def look(_: int, x: Tensor, y: Tensor) -> None:
            single.extend([x.dim()] * (x.dim() == len(module.kernel_size) + 1))

        return look

    _watched_first(model, {module: taken(module) for module in convolutions}, call)
    inputs = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
    largest = max(inputs, key=Tensor.dim, default=None)
    if largest is not None and largest.dim() in single:
        shape = ", ".join(map(str, largest.shape))
        raise InvalidArgument(
            f"the first calibration input is one image without a batch, of shape ({shape}). Give batches, "
            f"for example [images] with images of shape (N, {shape})."
        )


def order(model: nn.Module, modules: Mapping[str, nn.Module], call: Call) -> list[str]:
    """The layers that run, in the order in which they do, and that can be fitted: their answer is their
    weight times their windows, and the weight is theirs alone."""
    found: dict[str, bool] = {}

    def taken(name: str, module: nn.Module) -> Taken:
        def look(_: int, x: Tensor, y: Tensor) -> None:
            found[name] = found.get(name, True) and _is_product(module, x, y)

        return look

    _watched_first(model, {module: taken(name, module) for name, module in modules.items()}, call)
    return [name for name, fits in found.items() if fits and owned_once(model, modules[name])]


def _is_product(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a layer's answer is its weight times its windows: a subclass may pad or scale by itself."""
    if not isinstance(y, Tensor) or 0 in y.shape:
        return False
    weight: Any = module.weight
    seen, found = windows(module, x.detach()), results(module, y.detach())
    pixels = seen.shape[: seen.dim() - weight.dim() + 1]
    if pixels != found.shape[:-1]:
        return False
    some = torch.unravel_index(torch.linspace(0, pixels.numel() - 1, LOOKED_AT).long(), pixels)
    patches, rows = columns(module, seen[some]).float(), found[some].float()
    matrix = (
        filters_first(module, weight.detach()).flatten(1).float().reshape(len(patches), -1, patches.shape[2])
    )
    made = (patches @ matrix.mT).transpose(0, 1).reshape(rows.shape)
    if not rows.isfinite().all():
        return True  # whoever adds them up says so
    return bool((made - rows).norm() <= ROUNDING * (rows.norm() + made.norm() + 1e-30))


def targets(
    dense: nn.Module, modules: Mapping[str, nn.Module], calls: Sequence[Call]
) -> dict[str, list[list[Tensor]]]:
    """What each layer of the dense network answers at the picked pixels: [layer][call], each time it runs."""
    pick, found = Pick(calls), {name: [list[Tensor]() for _ in calls] for name in modules}

    def taken(name: str, module: nn.Module) -> Taken:
        return lambda number, _, y: found[name][number].append(pick.answers(module, number, y))

    watched(dense, {module: taken(name, module) for name, module in modules.items()}, calls)
    return found


def gathered(
    model: nn.Module,
    module: nn.Module,
    wanted: Sequence[Sequence[Tensor]],
    calls: Sequence[Call],
    given: Sequence[Tensor] | None = None,
) -> Sums:
    """The sums of a layer: what it is given in the model as it is now, and what it should answer, [call][time
    it runs]. Where the pruned model takes other ways than the dense one did, there is nothing to fit to. With
    `given`, that is what each call gives it, and the model does not run."""
    pick, sums, left = Pick(calls), Sums.zeros(module), [iter(own) for own in wanted]

    def taken(number: int, x: Tensor, _: Tensor) -> None:
        patches, answers = pick.patches(module, number, x), next(left[number], None)
        if answers is not None and len(answers) == patches.shape[1]:
            sums.add(patches, answers)

    if given is None:
        watched(model, {module: taken}, calls, [len(own) for own in wanted])
    for number, x in enumerate(given or ()):
        taken(number, x, x)
    return sums


def own(dense: nn.Module, modules: Mapping[str, nn.Module], calls: Sequence[Call]) -> dict[str, Sums]:
    """The sums of layers in the dense network itself."""
    pick, found = Pick(calls), {name: Sums.zeros(module) for name, module in modules.items()}

    def taken(sums: Sums, module: nn.Module) -> Taken:
        def add(number: int, x: Tensor, y: Tensor) -> None:
            sums.add(pick.patches(module, number, x), pick.answers(module, number, y))

        return add

    watched(dense, {module: taken(found[name], module) for name, module in modules.items()}, calls)
    return {name: sums.checked(name) for name, sums in found.items()}


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
