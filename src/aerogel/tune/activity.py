"""What of a layer's input is zero on real inputs, which only they can tell: `compile(calibration=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from aerogel.candidate import Config, Idle, Kernel
from aerogel.layout import Array, Shape
from aerogel.problem import Conv
from aerogel.runtime.eager import Call
from aerogel.runtime.module import Network
from aerogel.runtime.stays import image_shape
from aerogel.target import Target
from aerogel.tune.measure import interleaved
from aerogel.tune.trial import built, candidate, rotating


@dataclass(frozen=True, eq=False)
class Seen:
    """A layer's zeros, the average over the calibration inputs, and one of these, for timing."""

    idle: Idle
    images: Array

    def fitted(self, shape: Shape) -> Array:
        """The images in this shape: repeated, or a part of them."""
        times = [-(-want // have) for want, have in zip(shape, self.images.shape, strict=True)]
        return np.ascontiguousarray(np.tile(self.images, times)[tuple(slice(n) for n in shape)])


def seen(network: Network, calls: list[Call]) -> dict[str, Seen]:
    """For each convolution by its node's name; nothing without calls."""
    found: dict[str, list[Idle]] = {}
    images: dict[str, Array] = {}
    for call in calls:
        values = network.values(network.flat(*call))
        for node in network.convs():
            x = values[node.conv_inputs()[0]]
            own = x.float().numpy().reshape(image_shape(tuple(x.shape)))
            found.setdefault(node.name, []).append(Idle.of(own))
            images.setdefault(node.name, own)
    return {name: Seen(_average(own), images[name]) for name, own in found.items()}


def _average(of: list[Idle]) -> Idle:
    return Idle(*(round(float(np.mean(own))) for own in zip(*((i.elements, i.vectors, i.tiles) for i in of), strict=True)))


def break_even(
    conv: Conv, config: Config, other: Config, weight: Array, x: Array, bias: Array, target: Target, rounds: int
) -> float:
    """The share of active windows at which a configuration that skips zeros of x costs what another does: measured on `x` and on an
    input without zeros, and a line between them."""
    kernels, reads, writes = built(conv, config, weight, target)
    run = rotating(kernels, conv, reads, writes, x, bias, 1, target.threads)
    run()
    active = _share_active(kernels)
    full = np.where(x == 0, np.float32(1), x)
    calls = [candidate(conv, c, weight, given, bias, target) for c, given in ((config, x), (config, full), (other, x))]
    sparse, dense, others = (float(np.median(t)) for t in interleaved(calls, rounds))
    if dense <= others or dense <= sparse:
        return 1.0
    return float(np.clip(active + (others - sparse) / (dense - sparse) * (1 - active), 0.0, 1.0))


def _share_active(kernels: Iterable[Kernel]) -> float:
    """Of the windows that these kernels have looked at so far."""
    counts = [k.counts.reshape(-1, 8).sum(0) for k in kernels if k.counts is not None]
    return float(sum(c[0] for c in counts) / max(1, sum(c[1] for c in counts)))
