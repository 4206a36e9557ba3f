"""The policy, on timings put in by hand: a busy machine can neither fail nor pass these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aerogel.backends.cpu.lower.arena import Touch, place
from aerogel.ir import Choice, Config, Conv, Dtypes, Graph, Node, Ref, Timing, Tried
from aerogel.tune.assign import Costs, assign
from aerogel.tune.inside import by_demand, contenders, joined, pitched, poolable, refined
from aerogel.tune.search import keep, worth

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("what", "ours", "dense", "kept"),
    [
        ("twice as fast", [50.0] * 9, [100.0] * 9, True),
        ("equal", [100.0] * 9, [100.0] * 9, False),
        ("one percent faster: not worth it", [99.0] * 9, [100.0] * 9, False),
        ("slower", [110.0] * 9, [100.0] * 9, False),
        ("one lucky outlier", [100.0] * 8 + [10.0], [100.0] * 9, False),
        ("one unlucky outlier", [50.0] * 8 + [900.0], [100.0] * 9, True),
        (
            "noise that hits both alike",
            list(50 * np.linspace(1, 3, 9)),
            list(100 * np.linspace(1, 3, 9)),
            True,
        ),
        ("equal under noise", list(100 * np.linspace(1, 3, 9)), list(100 * np.linspace(1, 3, 9)), False),
        ("bimodal: faster half the time", [50.0, 120.0] * 6, [100.0] * 12, False),
        ("bimodal, but always faster", [50.0, 90.0] * 6, [100.0] * 12, True),
    ],
)
def test_keep_or_drop(what: str, ours: list[float], dense: list[float], kept: bool) -> None:
    assert keep(Timing.of(ours, dense)) == kept, what


def test_noise_alone_is_rarely_kept() -> None:
    """Two candidates of the same speed with 20 % noise each: the lower quartile rarely lies."""
    wrong = sum(
        keep(Timing.of(*(list(100 * np.exp(RNG.normal(0, 0.2, 25))) for _ in range(2)))) for _ in range(500)
    )
    assert wrong <= 5


def test_who_is_timed_on() -> None:
    """What is near the best of its method; of a method far behind only its best, so that explain has a time
    for it."""
    methods = ["dense", "dense", "direct", "direct", "stridepack"]
    assert worth(methods, [100.0, 160.0, 50.0, 70.0, 90.0]) == [0, 2, 3, 4]
    assert worth(methods, [100.0, 101.0, 20.0, 40.0, 81.0]) == [0, 2, 4]
    assert worth(["dense"], [3.0]) == [0]


def _chain(count: int) -> Graph:
    conv = Conv.parse("c3k3r1s1u1p0")
    names = ["x", *(f"v{i}" for i in range(count))]
    nodes = tuple(Node(names[i + 1], "conv", (Ref(names[i]), Ref("w")), conv=conv) for i in range(count))
    return Graph(("x",), ("w",), nodes, (Ref(names[-1]),))


def test_a_layer_that_wins_by_less_than_its_copies_stays_dense() -> None:
    graph = _chain(3)
    dense = {"v0": 100.0, "v1": 100.0, "v2": 100.0}
    copies = dict.fromkeys(("x", "v0", "v1", "v2"), 20.0)
    alone = Costs({"v0": 200.0, "v1": 70.0, "v2": 200.0}, dense, copies, graph.users())
    assert assign(alone) == frozenset(), "30 saved, 40 spent on copies"
    worth = Costs({"v0": 200.0, "v1": 50.0, "v2": 200.0}, dense, copies, graph.users())
    assert assign(worth) == {"v1"}


def test_a_slower_layer_is_taken_along_where_that_saves_copies() -> None:
    graph = _chain(3)
    costs = Costs(
        {"v0": 10.0, "v1": 110.0, "v2": 10.0},
        dict.fromkeys(("v0", "v1", "v2"), 100.0),
        dict.fromkeys(("x", "v0", "v1", "v2"), 20.0),
        graph.users(),
    )
    assert assign(costs) == {"v0", "v1", "v2"}


def test_assignment_is_the_best_of_all_on_small_graphs() -> None:
    for _ in range(60):
        count = 6
        graph = _chain(count)
        names = [n.name for n in graph.nodes]
        native, dense = ({n: float(RNG.uniform(10, 100)) for n in names} for _ in range(2))
        copies = {n: float(RNG.uniform(1, 40)) for n in ("x", *names)}
        costs = Costs(native, dense, copies, graph.users())
        every = [frozenset(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(2**count)]
        best = min(costs.total(s) for s in every)
        assert costs.total(assign(costs)) <= best * 1.1


def _random_steps() -> tuple[list[Touch], dict[str, int], dict[str, tuple[str, int]]]:
    """Values made one after the other from earlier ones; the values of "w" are parts of one whole, 64 bytes
    apart."""
    sizes, inside, made, steps = {"w": 64 * 30}, dict[str, tuple[str, int]](), ["@in"], list[Touch]()
    for i in range(30):
        x, old = (made[int(RNG.integers(max(0, len(made) - 6), len(made)))] for _ in range(2))
        sizes[name := str(i)] = 64 * int(RNG.integers(1, 9))
        if RNG.random() < 0.2:
            sizes[name], inside[name] = 64, ("w", 64 * i)
        same = RNG.random() < 0.5 and not old.startswith("@")
        if same:
            sizes[name] = 64 if name in inside else sizes[old]
        steps.append(Touch(x, name, old if same and sizes[old] == sizes[name] else None))
        made.append(name)
    return steps, sizes, inside


def test_the_arena_never_loses_a_value_that_is_still_read() -> None:
    for _ in range(300):
        steps, sizes, inside = _random_steps()
        offsets, size = place(steps, sizes, inside)
        memory = np.full(size // 64, -1)
        for i, step in enumerate(steps):
            for name in (step.x, step.residual):
                if name is not None and not name.startswith("@"):
                    held = memory[offsets[name] // 64 : (offsets[name] + sizes[name]) // 64]
                    assert (held == int(name)).all(), f"step {i} reads {name}, which is gone"
            assert offsets[step.y] % 64 == 0
            assert offsets[step.y] + sizes[step.y] <= size
            memory[offsets[step.y] // 64 : (offsets[step.y] + sizes[step.y]) // 64] = i
    assert place([], {}, {}) == ({}, 0)


def _choice(node: str, wide: float, narrow: float) -> Choice:
    """A layer at 28 x 28 whose rows of whole vectors took `wide` alone, and others `narrow`."""
    configs = [Config.make("direct", aligned=a, vectors=7) for a in (1, 0)]
    timed = [Tried(c, Timing.of([t] * 5, [100.0] * 5)) for c, t in zip(configs, (wide, narrow), strict=True)]
    timed.sort(key=lambda one: one.timing.p50_us)
    conv = Conv.parse("n1c8h28w28k8r3s3u1p1")
    return Choice(node, node, conv, timed[0].config, sparsity=0.9, tried=tuple(timed))


def test_rows_of_whole_vectors_must_pay_for_the_whole_image_size() -> None:
    plans = list(zip(*map(by_demand, [_choice("a", 50, 70), _choice("b", 60, 55)]), strict=True))
    assert [[c.config["aligned"] for c in plan] for plan in plans] == [[1, 0], [0, 0], [1, 1]]
    times = [{"a": [50.0], "b": [60.0]}, {"a": [70.0], "b": [55.0]}, {"a": [50.0], "b": [65.0]}]
    good = pitched(plans, times)
    assert [c.config["aligned"] for c in good] == [1, 0], "20 won, 5 lost"
    assert not any(c.reason for c in good)
    bad = pitched(plans, [times[0] | {"b": [90.0]}, *times[1:2], times[2] | {"b": [95.0]}])
    assert [c.config["aligned"] for c in bad] == [0, 0], "20 won, 35 lost"
    assert "slower by more" in bad[0].reason
    every = pitched(plans, [*times[:2], {"a": [50.0, 80.0], "b": [58.0, 90.0]}])
    assert [c.config["aligned"] for c in every] == [1, 1], "alone it was slower; the fastest round counts"
    assert "faster by more" in every[1].reason
    assert contenders(good[0], [], 8) == [good[0].config], (
        "its second configuration would change the pitch of its neighbours"
    )


def _direct(vectors: int, channels: int, in_order: int = 0) -> Config:
    return Config.make("direct", vectors=vectors, channels=channels, in_order=in_order, aligned=0)


def test_contenders_are_apart() -> None:
    """Two configurations that are alike lose alike: the running network is asked about others."""
    tried = [_direct(14, 256), _direct(13, 256), _direct(12, 256), _direct(14, 128)]
    timed = tuple(Tried(config, Timing.of([us], [us])) for us, config in enumerate(tried, 50))
    choice = Choice("a", "a", Conv.parse("n1c8h8w8k8r1s1u1p0"), tried[0], tried=timed)
    modelled = [_direct(14, 256, 1), _direct(11, 200), _direct(7, 64)]
    found = contenders(choice, modelled, 8)
    assert found == [tried[0], tried[3], modelled[0], modelled[2]]
    assert contenders(choice, modelled, 2) == found[:2]
    other = Config.make("stridepack", rows=1)
    near = (*timed, Tried(other, Timing.of([70.0], [70.0])))
    assert other in contenders(replace(choice, tried=near), modelled, 8), "of another method, and near"
    far = (*timed, Tried(other, Timing.of([80.0], [80.0])))
    assert other not in contenders(replace(choice, tried=far), modelled, 8)
    half = replace(choice, conv=replace(choice.conv, dtypes=Dtypes("f16", "f16", "f16", "f16")))
    known = contenders(half, modelled, 8)
    assert known == [tried[0], tried[3], modelled[0]], "7 x 64 rounds as nothing whose loss was looked at"
    for fixed in ("dense", "actsparse"):
        config = Config.make(fixed)
        assert contenders(replace(choice, config=config), modelled, 8) == [config]


def test_the_running_network_decides() -> None:
    configs = [_direct(14, 256), _direct(7, 256), _direct(7, 64)]
    choice = Choice("a", "a", Conv.parse("n1c8h8w8k8r1s1u1p0"), configs[0])
    faster = refined(choice, configs, [[[10.0] * 8, [9.0] * 8, [7.0] * 8]])
    assert faster.config == configs[2]
    assert "running network" in faster.reason
    assert faster.in_network is not None
    assert faster.in_network.ratio_p50 == pytest.approx(10 / 7)
    busy = refined(choice, configs, [[[10.0, *[30.0] * 7], [12.0] * 8, [9.0, *[40.0] * 7]]])
    assert busy.config == configs[2], "what other work adds says nothing"
    assert refined(choice, configs, [[[10.0], [9.95], [10.0]]]).config == configs[0], "hardly faster"
    both = [[[10.0], [9.0], [9.5]], [[10.0], [12.0], [9.0]]]
    assert refined(choice, configs, both).config == configs[2], "layers alike decide together"
    assert refined(choice, configs, [[[], [], []]]) == choice, "a layer that does not run there"


def test_another_method_may_be_the_one_that_pools() -> None:
    """Over a whole map the first is faster; in bands, with the pooling, another may be. What was not joined
    and what is hardly faster changes nothing."""
    configs = [Config.make("direct"), Config.make("stridepack")]
    skips, dense = Config.make("actsparse"), Config.make("dense")
    tried = tuple(Tried(c, Timing.of([float(i)], [9.0])) for i, c in enumerate([*configs, skips, dense], 1))
    choice = Choice("layer", "conv", Conv.parse("n1c8h8w8k8r1s1u1p0"), configs[0], tried=tried)
    assert poolable(choice) == configs, "neither dense nor what depends on its input"
    assert poolable(replace(choice, config=skips)) == [skips]
    apart = {"conv": [10.0] * 8, "pool": [4.0] * 8}

    def chosen(*together: float, own: str = "pool") -> Choice:
        return joined(choice, "pool", configs, [apart, *({own: [us] * 8} for us in together)])

    assert (chosen(11, 9).config, chosen(11, 9).pooled) == (configs[1], True)
    assert "pooling" in chosen(11, 9).reason
    assert (chosen(9, 8.95).config, chosen(9, 8.95).pooled) == (configs[0], True), "hardly faster"
    assert chosen(11).config == configs[0], "no time was left for the second"
    assert chosen(14.5, 15) == choice, "apart is faster"
    assert chosen(5, 5, own="conv") == choice, "the program did not join them"
