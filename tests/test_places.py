"""Layers are tuned where they will run: trials, cost models and records know how maps stand there."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import Trial, using
from aerogel.backends.cpu.backend import Cpu
from aerogel.backends.cpu.runner import CpuRunner, program, workspace
from aerogel.backends.cpu.trial import built
from aerogel.capture.network import Network
from aerogel.capture.nodes import problem
from aerogel.codegen.cpu.abi import native
from aerogel.ir import ALONE, Conv, Layout, Place, Stats, Target, host
from aerogel.methods import METHODS, cpu_form, demands
from aerogel.runtime.reading import network_of
from tests.small_models import sparse

X = torch.zeros(1, 16, 28, 28)


class Bottleneck(nn.Module):
    """As in a ResNet: the 3x3 in the middle widens the rows of all maps of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 1),
            nn.ReLU(),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 1, stride=2),
            nn.Conv2d(64, 32, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _network() -> Network:
    return network_of(sparse(Bottleneck(), 0.9), ((X,), {}), None)[0]


def _stands(layout: Layout) -> tuple[int, tuple[int, int, int, int]]:
    return layout.pitch, layout.border


@pytest.mark.parametrize("demanding", [False, True])
def test_a_trial_stands_as_the_network_does(demanding: bool) -> None:
    backend, network = Cpu(replace(host(), threads=1)), _network()
    shapes = network.shapes([X])
    places = backend.places(network, shapes)
    convs = {node.name: problem(node, shapes) for node in network.convs()}
    configs = {}
    for node in network.convs():
        stats = replace(network.stats(node), place=places[node.name])
        offered = cpu_form("direct").configs(convs[node.name], backend.target, stats)
        wants = demanding and convs[node.name].r == 3 and convs[node.name].stride == (1, 1)
        configs[node.name] = next(config for config in offered if demands(config) == wants)
    assert demanding or backend.places(network, shapes, configs) == places
    places = backend.places(network, shapes, configs)
    made = program(network, shapes, configs, backend.target)
    steps = {step.conv: step.kernel for part in made.parts for step in part.natives if step.conv}
    assert steps.keys() == configs.keys()
    wide = 0
    for node in network.convs():
        name, weight = node.name, network.weight(node)
        given = convs[name], configs[name], weight, backend.target
        (trial,), (alone,) = native(built(*given, places[name])), native(built(*given))
        assert _stands(trial.writes) == _stands(steps[name].writes), name
        if trial.reads.kind == "planar":
            assert _stands(trial.reads) == _stands(steps[name].reads), name
        wide += trial.writes.pitch > alone.writes.pitch
    assert wide, "nobody widens anybody's rows: the test says nothing"


def test_a_block_of_vectors_fits_the_place() -> None:
    """14 x 14 alone is 13 vectors, with rows of 15 it is 14: a block of 13 would run twice."""
    conv, weight = Conv.parse("n1c256h14w14k1024r1s1u1p0"), Stats(1024 * 256, 1024 * 26)
    target = Target("avx512", ("f16c",))
    place = Place((1, 1, 1, 1), 15, (1, 1, 1, 1), 15)
    alone, there = (
        next(cpu_form("direct").configs(conv, target, replace(weight, place=own)))["vectors"]
        for own in (ALONE, place)
    )
    assert 13 % alone == 0
    assert 14 % there == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("text", ["n1c32h14w14k64r3s3u1p1", "n1c32h6w6k64r5s5u1p2", "n1c32h9w9k64r1s1u1p0"])
def test_a_place_changes_the_order_and_not_the_offer(name: str, threads: int, text: str) -> None:
    """What was tuned at one place is a configuration at any other: files and records are looked at without
    one."""
    conv, target = Conv.parse(text), replace(host(), threads=threads)
    stats = Stats(64 * 288, 64 * 30, shared=64 * 29, alike=90)
    place = Place((2, 2, 2, 2), 19, (2, 2, 2, 2), 19)
    here, there = (
        set(cpu_form(name).configs(conv, target, replace(stats, place=own))) for own in (ALONE, place)
    )
    assert here == there


class _Noting(Cpu):
    """The CPU; notes where layers were timed."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: set[tuple[str, Place]] = set()

    def candidate(self, conv: Conv, *given: Any) -> Trial:
        self.timed.add((str(conv), given[-1]))
        return super().candidate(conv, *given)


def test_layers_are_timed_and_remembered_at_their_place(tmp_path: Path) -> None:
    backend, model = _Noting(), sparse(Bottleneck(), 0.9).eval()
    with using(backend):
        aerogel.compile(model, X, store=tmp_path, progress=False)
    network = _network()
    shapes = network.shapes([X])
    places = backend.places(network, shapes)
    assert backend.timed == {(str(problem(n, shapes)), places[n.name]) for n in network.convs()}
    records = [path.read_text() for path in tmp_path.rglob("layers/*/*/*.json")]
    assert len(records) == len(backend.timed)
    assert all(any(str(place) in record for place in places.values()) for record in records)


def test_what_was_tuned_holds_for_any_number_of_images() -> None:
    """Not so for another image size: there the first configuration is taken."""
    model = sparse(Bottleneck(), 0.9).eval()
    fast = aerogel.compile(model, X, tune="off")
    backend, network = fast.backend, fast.network
    assert isinstance(backend, Cpu)
    assert network is not None
    choices = []
    for choice in fast.plan.choices:
        offered = backend.form(choice.config.method).configs(choice.conv, backend.target, Stats(900, 90))
        choices.append(replace(choice, config=list(islice(offered, 3))[-1]))
    runner = CpuRunner(network, replace(fast.plan, choices=tuple(choices)), backend.target)
    tuned = {choice.node: choice.config for choice in choices}
    for images in (1, 3):
        shapes = network.shapes([X.expand(images, -1, -1, -1)])
        assert runner._choices(shapes, backend.target, True) == tuned
    other = runner._choices(network.shapes([X[:, :, :20, :20]]), backend.target, True)
    assert other.keys() == tuned.keys()
    assert other != tuned


def test_a_copy_that_cuts_a_map_is_part_of_its_readers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a method that needs one would look faster in the network than one that reads the map as it is."""
    backend, network = Cpu(replace(host(), threads=1)), _network()
    shapes = network.shapes([X])
    configs = {}
    for node in network.convs():
        conv = problem(node, shapes)
        configs[node.name] = next(cpu_form("direct").configs(conv, backend.target, network.stats(node)))
    made = program(network, shapes, configs, backend.target)
    steps = [step for part in made.parts for step in part.natives]
    clock = iter(range(0, 10**9, 1000))
    space = workspace(network, made, backend.target)
    with monkeypatch.context() as patch:
        patch.setattr("aerogel.backends.cpu.workspace.time.perf_counter_ns", lambda: next(clock))
        spent = space.timed([X])
    strided = [node.name for node in network.convs() if problem(node, shapes).stride != (1, 1)]
    assert len(strided) == 2
    for name in strided:
        copies = sum(step.y == own.x for own in steps if own.y == name for step in steps)
        assert copies
        assert spent[name] == 1 + copies, "every kernel takes a microsecond by this clock"
    assert sum(spent.values()) == len(steps)
