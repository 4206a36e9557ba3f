"""What heal() makes small: how far a model is from its teacher on a call.

    KL divergence where answers are classes (judge.py), of logits at temperature 3; else the relative error
    + a tenth of the mean relative error of answers and of pruned layers' outputs

The relative error is the mean squared one over the teacher's variance. Batch norm is in eval mode, its
statistics taken anew before the first step. A small ResNet on Fashion-MNIST (dense 90.8 %), 250 steps of 128
images, at 80 and 90 % zeros: 90.6 and 89.6 % so, 90.6 and 90.0 % with statistics that follow every step, 90.2
and 88.0 % with those of the dense network. Following is as good or a little better, but needs large batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.pruning.judge import classes
from aerogel.pruning.layers import prunable
from aerogel.runtime.eager import Call, as_call
from aerogel.runtime.weights import hooks

TEMPERATURE = 3.0
"""At which logits are compared: what a teacher thinks of the wrong classes is seen too. Where a softmax made
probabilities, of thousands of characters perhaps, they are compared as they are."""
LAYERS = 0.1
"""The weight of the relative errors."""


class Loss:
    """Of a model beside its teacher. Both are in eval mode; `close` takes the hooks off their layers."""

    def __init__(self, model: nn.Module, teacher: nn.Module, dtype: torch.dtype | None) -> None:
        self._model, self._teacher = model, teacher
        self._device = next(model.parameters()).device
        self._half = torch.autocast(self._device.type, dtype or torch.bfloat16, enabled=dtype is not None)
        self._mine, self._wanted = dict[str, Tensor](), dict[str, Tensor]()
        pruned, there = with_zeros(model), dict(prunable(teacher))
        layers = [name for name in pruned if name in there]
        self._hooks = [pruned[n].register_forward_hook(partial(_seen, self._mine, n)) for n in layers]
        self._hooks += [there[n].register_forward_hook(partial(_seen, self._wanted, n)) for n in layers]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def learn(self, sample: Any) -> None:
        """Gradients of one call."""
        with torch.enable_grad():
            far = self._loss(sample)
        if not far.requires_grad:
            raise InvalidArgument(
                "the model's answers have no gradient: its forward() runs under no_grad or detaches them"
            )
        far.backward()  # type: ignore[no-untyped-call]

    def mean(self, samples: list[Any]) -> float:
        """Over these calls; what is no number is infinitely far."""
        with torch.no_grad():
            found = sum(float(self._loss(sample)) for sample in samples) / len(samples)
        return found if math.isfinite(found) else math.inf

    def call(self, sample: Any) -> Call:
        """What was given as a call, on the model's device."""
        call = as_call((), sample) if isinstance(sample, Mapping) else as_call(sample, None)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(self._device), call)
        return args, kwargs

    def _loss(self, sample: Any) -> Tensor:
        args, kwargs = self.call(sample)
        try:
            with self._half:
                with torch.no_grad():
                    wanted = self._teacher(*args, **kwargs)
                answers = self._model(*args, **kwargs)
        except TypeError as why:
            raise InvalidArgument(
                f"a call of inputs does not fit the model ({why}): it is a tensor, a tuple of arguments or a "
                "dict of arguments by name; from a loader of pairs take the images, [x for x, _ in loader]"
            ) from why
        pairs = _paired(answers, wanted)
        near = [(mine, self._wanted[name]) for name, mine in self._mine.items() if name in self._wanted]
        near = [*pairs, *((mine, other) for mine, other in near if mine.shape == other.shape)]
        self._mine.clear()
        self._wanted.clear()
        apart = torch.stack([_relative(*both) for both in near]).mean()
        return torch.stack([_apart(*both) for both in pairs]).sum() + LAYERS * apart


def with_zeros(model: nn.Module) -> dict[str, nn.Module]:
    """Layers whose weights have zeros, by name; what torch's own pruning masks keeps its zeros by itself."""
    return {
        name: module
        for name, module in prunable(model)
        if not hooks(module) and bool((torch.as_tensor(module.weight) == 0).any())
    }


def _seen(outputs: dict[str, Tensor], name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
    outputs[name] = output


def _paired(answers: Any, wanted: Any) -> list[tuple[Tensor, Tensor]]:
    """The float tensors of two answers, each with its own."""
    mine, other = (
        [t for t in pytree.tree_leaves(own) if isinstance(t, Tensor) and t.is_floating_point()]
        for own in (answers, wanted)
    )
    shapes = [[tuple(t.shape) for t in own] for own in (mine, other)]
    if not mine or shapes[0] != shapes[1]:
        raise InvalidArgument(
            f"the model answers {_words(shapes[0])}, the teacher {_words(shapes[1])}: a teacher answers the "
            "same float tensors, as the network before pruning does"
        )
    return list(zip(mine, other, strict=True))


def _words(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(" x ".join(map(str, shape)) or "a number" for shape in shapes) or "no float tensor"


def _apart(answer: Tensor, wanted: Tensor) -> Tensor:
    """By classes, where it has some."""
    found = classes(wanted)
    if found is None:
        return _relative(answer, wanted)
    heat = 1.0 if found.probabilities else TEMPERATURE
    mine, other = ((found.logits(t) / heat).log_softmax(1) for t in (answer, wanted))
    return heat**2 * F.kl_div(mine, other, reduction="batchmean", log_target=True)


def _relative(answer: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.float()
    return F.mse_loss(answer.float(), wanted) / wanted.var(correction=0).clamp_min(1e-12)
