"""What of a layer's input is zero on real inputs, which only they can tell: `compile(calibration=...)`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aerogel.backends import Backend
from aerogel.capture.network import Network
from aerogel.capture.nodes import image_shape
from aerogel.ir import Array, Config, Conv, Idle, Place, Shape, Weight, ceil_div
from aerogel.runtime.eager import Call
from aerogel.tune.measure import interleaved


@dataclass(frozen=True, eq=False)
class Seen:
    """A layer's zeros, the average over the calibration inputs, and one of these, for timing."""

    idle: Idle
    images: Array

    def fitted(self, shape: Shape) -> Array:
        """The images in this shape: repeated, or a part of them."""
        times = [ceil_div(want, have) for want, have in zip(shape, self.images.shape, strict=True)]
        return np.ascontiguousarray(np.tile(self.images, times)[tuple(slice(n) for n in shape)])


def seen(network: Network, calls: list[Call]) -> dict[str, Seen]:
    """For each convolution by its node's name; nothing without calls."""
    found: dict[str, list[Idle]] = {}
    images: dict[str, Array] = {}
    for call in calls:
        values = network.values(network.captured.flat(*call))
        for node in network.convs():
            x = values[node.conv_inputs()[0]]
            own = x.float().numpy().reshape(image_shape(tuple(x.shape)))
            found.setdefault(node.name, []).append(Idle.of(own))
            images.setdefault(node.name, own)
    return {name: Seen(_average(own), images[name]) for name, own in found.items()}


def _average(of: list[Idle]) -> Idle:
    return Idle(
        *(
            round(float(np.mean(own)))
            for own in zip(*((i.elements, i.vectors, i.tiles) for i in of), strict=True)
        )
    )


def break_even(
    backend: Backend,
    conv: Conv,
    config: Config,
    other: Config,
    weight: Weight,
    x: Array,
    bias: Array,
    rounds: int,
    place: Place,
) -> float:
    """The active share at which a configuration that skips zeros of x costs what another does: measured on
    `x` and on an input without zeros, and a line between them."""
    active = backend.active(conv, config, weight, x)
    full = np.where(x == 0, np.float32(1), x)
    tried = ((config, x), (config, full), (other, x))
    calls = [backend.candidate(conv, c, weight, given, bias, place) for c, given in tried]
    sparse, dense, others = (float(np.median(t)) for t in interleaved(calls, rounds, clock=backend.clock))
    if dense <= others or dense <= sparse:
        return 1.0
    return float(np.clip(active + (others - sparse) / (dense - sparse) * (1 - active), 0.0, 1.0))
