"""All calls stopped before the same layer: the same weights as layer by layer, whatever the network does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel.pruning import obs, walk
from aerogel.pruning.walk import Lost, Walk
from aerogel.runtime.eager import Call


def data(count: int = 5, *shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(16, *(shape or (12,)), generator=random) for _ in range(count)]


def as_calls(inputs: list[Tensor]) -> list[Call]:
    return [((x,), {}) for x in inputs]


class Net(nn.Module):
    """A body of three layers; how they are called is each test's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.a(x).relu()).relu())
        return found


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.b(self.a(x).relu()).relu()).relu())
        return found


class Sometimes(Net):
    """Leaves a layer out where the data say so."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        found: Tensor = self.c(self.b(x) if float(x[0, 0]) > 0 else x)
        return found


class Remembers(Net):
    """What one layer gave, for a later one, in a place that all calls share."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.a(x).relu()
        y = self.b(x)
        found: Tensor = self.c(y + self.kept)
        return found


class Elsewhere(Net):
    """Runs a layer in a thread of its own, where nobody waits."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            x = pool.submit(self.b, self.a(x).relu()).result()
        found: Tensor = self.c(x.detach())
        return found


class OnlyHere(Net):
    """Does not run in another thread."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not here")
        return super().forward(x)


def weights(made: Callable[[], Net], calls: list[Tensor], **patched: Any) -> dict[str, Tensor]:
    """Of the network, pruned and repaired."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(walk, name, value)
        pruned = aerogel.prune(made(), 0.5, score="obs", scope="uniform", calibration=calls, progress=False)
    return {name: value.clone() for name, value in pruned.state_dict().items()}


@pytest.mark.parametrize("made", [Net, Twice, Sometimes, Remembers, Elsewhere, OnlyHere])
def test_the_same_as_layer_by_layer(made: Callable[[], Net]) -> None:
    before = threading.active_count()
    wanted = weights(made, data(), MOST_CALLS=0)
    got = weights(made, data())
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        assert torch.allclose(value.float(), got[name].float(), atol=1e-5), name
    assert threading.active_count() == before


def test_the_network_runs_once() -> None:
    """And not once for each layer."""
    runs = 0

    class Counted(Net):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal runs
            runs += threading.current_thread() is not threading.main_thread()
            return super().forward(x)

    weights(Counted, data())
    assert runs == 5


def test_a_network_that_remembers_is_found_out() -> None:
    net, calls = Remembers().eval(), as_calls(data())
    layers = [net.a, net.b, net.c]
    with Walk(net, layers, calls) as together:
        for layer in layers:
            together.inputs(layer)
        with pytest.raises(Lost):
            together.check()


def test_where_maps_are_too_large_they_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two layers are given 12 numbers a row, by all calls 3,840 bytes; the last one half of it."""

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.c = nn.Linear(12, 6), nn.Linear(6, 4)

    net, calls = Wide().eval(), as_calls(data())
    monkeypatch.setattr(walk, "MOST_BYTES", 3000)
    with Walk(net, [net.a, net.b, net.c], calls) as some:
        assert some.inputs(net.a) is some.inputs(net.b) is None
        found = some.inputs(net.c)
        assert found is not None
        assert [tuple(x.shape) for x in found] == [(16, 6)] * 5


def test_threads_stay_as_many_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is interrupted ends its calls."""
    before, threads = threading.active_count(), torch.get_num_threads()
    seen: list[int] = []

    def interrupted(*_: Any) -> None:
        seen.append(threading.active_count() - before)
        raise KeyboardInterrupt

    monkeypatch.setattr(obs, "fitted", interrupted)
    model = Net()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        aerogel.prune(model, 0.5, score="obs", scope="uniform", calibration=data(), progress=False)
    assert seen == [5]
    assert (threading.active_count(), torch.get_num_threads()) == (before, threads)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_without_threads_to_start_layers_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, threads, starts = weights(Net, data()), torch.get_num_threads(), iter(range(9))
    start = threading.Thread.start

    def third(thread: threading.Thread) -> None:
        if next(starts) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", third)
    got = weights(Net, data())
    assert next(starts) == 3
    assert all(torch.allclose(wanted[name].float(), got[name].float(), atol=1e-5) for name in wanted)
    assert (threading.active_count(), torch.get_num_threads()) == (before, threads)
