"""Batch norm after pruning: its means and variances as the pruned network has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from aerogel.pruning.gram import inference
from aerogel.pruning.judge import answers, distance
from aerogel.runtime.eager import Call, images

FEWEST = 16
"""Images of a call, on average, from which batch norm is estimated again."""
SEEN = 256
"""Images by which it is judged whether that was good."""


def settle(model: nn.Module, dense: nn.Module, calls: Sequence[Call]) -> None:
    """Batch norm estimated again, if that brings the answers nearer to the dense network's: layers that were
    fitted to its means may have them already."""
    norms = _norms(model)
    kept = _statistics(norms)
    some = calls[: max(1, SEEN // max(1, images(calls[0])))]
    with inference(model), inference(dense):
        wanted = answers(dense, some)
        before = distance(wanted, answers(model, some))
        estimate(model, calls)
        if distance(wanted, answers(model, some)) > before:
            _put_back(norms, kept)


def estimate(model: nn.Module, calls: Sequence[Call]) -> None:
    """Means and variances of batch norm again, as the pruned network has them: over all images. What no call
    reaches keeps its own, and so does everything where a call fails."""
    norms = _norms(model)
    if not norms or sum(map(images, calls)) < FEWEST * len(calls):
        return
    kept, momenta, seen = _statistics(norms), [norm.momentum for norm in norms], 0
    with inference(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        try:
            for args, kwargs in calls:
                many = images((args, kwargs))
                if many < 2:
                    continue  # has no variance where a layer has one pixel
                seen += many
                for norm in norms:
                    norm.momentum = many / seen
                model(*args, **kwargs)
        except BaseException:
            _put_back(norms, kept)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    idle = [i for i, norm in enumerate(norms) if not norm.num_batches_tracked]
    _put_back([norms[i] for i in idle], [kept[i] for i in idle])


def _norms(model: nn.Module) -> list[_BatchNorm]:
    """Batch norm with statistics of its own."""
    every = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return [m for m in every if m.track_running_stats and m.running_mean is not None]


def _statistics(norms: Sequence[_BatchNorm]) -> list[list[Tensor]]:
    return [[buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in norms]


def _put_back(norms: Sequence[_BatchNorm], kept: Sequence[Sequence[Tensor]]) -> None:
    for norm, values in zip(norms, kept, strict=True):
        for buffer, value in zip(norm.buffers(recurse=False), values, strict=True):
            buffer.copy_(value)
