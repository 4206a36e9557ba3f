"""Parts of other values: concatenations that nothing is copied into, slices that are read where they stand;
enlarged maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from tests.small_models import right, runs, sparse


class Parts(nn.Module):
    """Convolutions of one size to make wholes of; each test says how."""

    def __init__(self, join: Any, channels: int) -> None:
        super().__init__()
        self.join = join
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two, self.small = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.leave = nn.Conv2d(channels, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.join(self, F.relu(self.enter(x))))  # type: ignore[no-any-return]


def _c2f(m: Parts, e: Tensor) -> Tensor:
    a, b = e.chunk(2, 1)
    c = m.small(b)
    return torch.cat([a, b, c, m.small(c)], 1)


def _dense(m: Parts, e: Tensor) -> Tensor:
    both = torch.cat([e, m.one(e)], 1)
    return torch.cat([e, m.one(e), m.two(both[:, :8] + e)], 1)


def _grown(m: Parts, e: Tensor) -> Tensor:
    f = m.one(e)
    g = m.two(f)
    few = torch.cat([e, f], 1)
    return torch.cat([e, f, g], 1) + torch.cat([few, F.max_pool2d(g, 3, 1, 1)], 1)


def _nested(m: Parts, e: Tensor) -> Tensor:
    return torch.cat([torch.cat([m.one(e), e], 1), F.avg_pool2d(e, 3, 1, 1)], 1)


def _twice(m: Parts, e: Tensor) -> Tensor:
    f = m.one(e)
    return torch.cat([e, e, f], 1) * torch.cat([f, e, f], 1)


def _skipped(m: Parts, e: Tensor) -> Tensor:
    f = m.one(e)
    g = F.relu(m.two(f) + f)  # the last reader of f, but for the whole that f is a part of
    return torch.cat([f, g], 1)


def _rest(m: Parts, e: Tensor) -> Tensor:
    a, b = torch.split(e, [3, 5], 1)
    return torch.cat([b, a, m.one(e)], 1)


def _enlarged(m: Parts, e: Tensor) -> Tensor:
    small = F.max_pool2d(e, 2)
    return torch.cat(
        [
            F.interpolate(m.one(small), scale_factor=2),
            e,
            F.interpolate(F.max_pool2d(small, 2), scale_factor=4),
        ],
        1,
    )


def _woven(m: Parts, e: Tensor) -> Tensor:
    small = F.max_pool2d(e, 2)
    return torch.cat([m.up(small), F.pixel_shuffle(m.one(small), 2), e], 1)


def _again(m: Parts, e: Tensor) -> Tensor:
    out: Tensor = m.one(torch.cat(e.chunk(4, 1), 1))
    return out


def _to_size(m: Parts, e: Tensor) -> Tensor:
    return torch.cat([F.interpolate(m.one(F.max_pool2d(e, 2)), size=e.shape[2:]), e], 1)


WHOLES = [
    (_c2f, 16, 0),
    (_dense, 24, None),
    (_grown, 24, None),
    (_nested, 24, 0),
    (_twice, 24, None),
    (_skipped, 16, 0),
    (_rest, 16, 2),
    (_again, 8, 0),
    (_enlarged, 24, 0),
    (_woven, 14, 0),
    (_to_size, 16, None),
]


@pytest.mark.parametrize(("join", "channels", "copies"), WHOLES)
@pytest.mark.parametrize("batch", [1, 2])
def test_wholes_of_parts(join: Any, channels: int, copies: int | None, batch: int) -> None:
    model, x = sparse(Parts(join, channels)), torch.randn(batch, 3, 12, 20)
    with torch.no_grad():
        model.up.weight *= torch.rand_like(model.up.weight) < 0.2  # type: ignore[union-attr,operator,arg-type]
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    (program,) = runs(fast).programs.values()
    natives = [s for part in program.parts for s in part.natives]
    if batch == 1 and copies is not None:
        assert sum(s.label.startswith("concat") for s in natives) == copies
        assert sum(p.node is not None for p in program.parts) == 0, "nothing is left to torch"
    for arena in runs(fast).memory.arenas:
        arena.buffer.view(np.float32)[:] = np.nan  # nothing may be read that was not written in the same call
    right(model, fast, torch.randn(batch, 3, 12, 20))


def test_a_size_taken_from_another_map_is_no_map() -> None:
    model, x = sparse(Parts(_to_size, 16)), torch.randn(1, 3, 12, 20)
    right(model, aerogel.compile(model, x, progress=False), x)


def test_a_factor_that_only_rounds_to_a_whole_number_repeats_other_pixels() -> None:
    """At 40 pixels 4.05 gives 162, at 8 it gives 32 as 4 does; but not of the same pixels."""
    model = sparse(Parts(lambda m, e: F.interpolate(m.one(e), scale_factor=4.05), 8))
    fast = aerogel.compile(model, torch.randn(1, 3, 40, 40), tune="off")
    right(model, fast, torch.randn(1, 3, 8, 8))
