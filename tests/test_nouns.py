"""Frozen values with strings that round-trip, and errors that say what to do."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, ShapeError, UnsupportedModel
from aerogel.ir import (
    EXTRAS,
    VECTOR_BYTES,
    Beside,
    Choice,
    Config,
    Conv,
    Dtypes,
    Graph,
    Layout,
    Node,
    Plan,
    Ref,
    Refusal,
    Special,
    Stats,
    Target,
    Timing,
    Tried,
    host,
)

small = st.integers(1, 9)
kinds = st.sampled_from(["f32", "f16", "bf16"])
epilogues = st.sampled_from(
    [
        (),
        ("bias",),
        ("bias", "add", "relu"),
        ("silu", "add"),
        ("leaky_relu0.1",),
        ("bias", "threshold0.25"),
        ("bias", "leaky_relu1e-05"),
    ]
)


@st.composite
def convs(draw: st.DrawFn) -> Conv:
    groups = draw(small)
    r, s, dh, dw = (draw(small) for _ in range(4))
    conv = Conv(
        groups * draw(small), groups * draw(small), r, s, (draw(small), draw(small)),
        (draw(small), draw(small), draw(small), draw(small)), (dh, dw), groups,
        Dtypes(draw(kinds), draw(kinds), draw(kinds), draw(kinds)), draw(epilogues),
    )  # fmt: skip
    return (
        conv.at(draw(st.integers(0, 3)), dh * r + draw(small), dw * s + draw(small))
        if draw(st.booleans())
        else conv
    )


@given(convs())
def test_conv_round_trips(conv: Conv) -> None:
    assert Conv.parse(str(conv)) == conv


def test_the_contracts_example_parses() -> None:
    conv = Conv.parse("n1c64h56w56k64r3s3u1p1+bias+relu")
    assert (conv.y_shape, conv.weight_shape, conv.activation) == ((1, 64, 56, 56), (64, 64, 3, 3), "relu")
    assert conv.dense_flops == 2 * 64 * 64 * 9 * 56 * 56
    assert str(conv.layer()) == "c64k64r3s3u1p1+bias+relu"


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    for parse in (
        Conv.parse,
        Layout.parse,
        Target.parse,
        Config.parse,
        Graph.from_json,
        Plan.from_json,
    ):
        with suppress(AerogelError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c3k4r1s1u1p0g2", "2 groups do not divide"),
        ("c3k4r1s1u0p0", "start at 1"),
        ("n1c3h2w2k4r5s5u1p0", "does not fit the padded image"),
        ("n1c3h8w8k4r1s1u1p0+relu+bias", "bias comes first"),
        ("n1c3h8w8k4r1s1u1p0+mish", "'mish' is unknown"),
        ("c3k4r1s1u1p0:f64", "'f64' is unknown"),
        ("c3k4r1s1u1p1x2x3", "top x left x bottom x right"),
        ("c99999999999k4r1s1u1p0", "under 2^31"),
        ("n1c3k4r1s1u1p0", "all of n, h and w, or none"),
    ],
)
def test_bad_convs_say_why(text: str, says: str) -> None:
    with pytest.raises((ShapeError, InvalidArgument), match=says.replace("^", r"\^")):
        Conv.parse(text)


four = st.tuples(*[st.integers(0, 5)] * 4)


@given(
    st.sampled_from(["planar", "contiguous", "channels_last"]),
    st.integers(1, 99),
    four,
    st.integers(0, 999),
    kinds,
)
def test_layout_round_trips(
    kind: str, pitch: int, border: tuple[int, int, int, int], slack: int, dtype: str
) -> None:
    layout = Layout(kind, pitch, border, slack, dtype)
    assert Layout.parse(str(layout)) == layout
    phases = Layout("phases", pitch, border, slack, dtype, (2, 3), (1, 3))
    assert Layout.parse(str(phases)) == phases


@given(st.integers(0, 3), small, small, small, four, st.integers(0, 3))
@settings(max_examples=200)
def test_layouts_hold_the_image_and_zero_borders(
    n: int, c: int, h: int, w: int, border: tuple[int, int, int, int], extra: int
) -> None:
    x = np.random.default_rng(0).standard_normal((n, c, h, w)).astype(np.float32)
    pitch = w + max(border[1], border[3]) + extra
    for layout in (Layout("planar", pitch, border, 5), Layout("contiguous", w), Layout("channels_last", w)):
        buffer = np.full(layout.elements(x.shape), np.nan, np.float32)
        layout.write(buffer, x)
        assert np.array_equal(layout.read(buffer, x.shape), x)
        assert layout.dirty_border(buffer, x.shape) == 0
        assert np.isnan(buffer[len(buffer) - layout.slack :]).all(), "the slack is nobody's"
    planar = Layout("planar", pitch, border, 5)
    if n:
        buffer = np.full(planar.elements(x.shape), np.nan, np.float32)
        planar.write(buffer, x)
        plane, (top, left, bottom, right) = planar.plane(h, w), border
        for i in range(n * c):  # every border read is a zero inside the buffer
            origin = planar.front + i * plane
            for row in (*range(-top, 0), *range(h, h + bottom)):
                around = buffer[origin + row * pitch - left : origin + row * pitch + w + right]
                assert len(around) == w + left + right
                assert not around.any()


def test_phases_read_back_element_by_element() -> None:
    x = np.arange(1, 2 * 3 * 7 * 5 + 1, dtype=np.float32).reshape(2, 3, 7, 5)
    layout = Layout("phases", 9, (1, 0, 2, 3), 0, "f32", (2, 3), (2, 2))
    buffer = np.full(layout.elements(x.shape), np.nan, np.float32)
    layout.write(buffer, x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 2), (0, 3)))
    plane = layout.phase_plane(7, 5)
    for n, c, i, j in np.ndindex(*padded.shape):
        a, b = i % 2, j % 3
        if b < 2:
            at = (((n * 3 + c) * 2 + a) * 2 + b) * plane + i // 2 * 9 + j // 3
            assert buffer[at] == padded[n, c, i, j]


def test_a_pitch_too_small_is_refused() -> None:
    with pytest.raises(ShapeError, match="leaves no room"):
        Layout("planar", 7, (0, 1, 0, 0)).elements((1, 1, 3, 7))


@given(
    st.sampled_from(sorted(VECTOR_BYTES)),
    st.sets(st.sampled_from(EXTRAS)),
    st.integers(1, 10**9),
    st.integers(1, 64),
)
def test_target_round_trips(isa: str, extras: set[str], size: int, threads: int) -> None:
    target = Target(isa, tuple(sorted(extras)), size, size + 1, size + 2, threads)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize("threads", [0, -1, 2**31])
def test_a_target_with_threads_that_no_machine_has_is_refused(threads: int) -> None:
    with pytest.raises(ShapeError, match=f"1 to 4096 threads, not {threads}"):
        Target("avx512", threads=threads)


def test_this_machine_is_a_target_and_a_lesser_one_runs_here() -> None:
    assert Target.parse(str(host())) == host()
    assert host().runs_here()
    assert host().lower("generic").runs_here() or host().isa == "neon"
    assert not replace(host(), isa="neon", extras=()).runs_here() or host().isa == "neon"


@given(st.dictionaries(st.sampled_from(["vectors", "channels", "groups"]), st.integers(0, 999)))
def test_config_round_trips(options: dict[str, int]) -> None:
    config = Config.make("direct", **options)
    assert Config.parse(str(config)) == config
    assert all(config[name] == value for name, value in options.items())


def test_stats_count() -> None:
    weight = np.zeros((3, 2, 2, 2), np.float32)
    weight[0, 0, 0, 0] = weight[2] = 1.0
    stats = Stats.of(weight)
    assert stats == Stats(24, 9, 1, 8, shared=8, alike=22)
    assert stats.sparsity == 1 - 9 / 24


def _graph() -> Graph:
    conv = Conv.parse("c3k8r3s3u1p1+bias+add+relu")
    x, a, b = Ref("x"), Ref("a"), Ref("b")
    first = Node("a", "conv", (x, Ref("w")), conv=replace(conv, epilogue=()), layer="stem")
    second = Node("b", "conv", (a, Ref("w"), Ref("bias"), a), conv=replace(conv, c=8))
    third = Node("c", "aten.max_pool2d.default", (b, (2, 2)))
    fourth = Node(
        "d",
        "aten.full_like.default",
        (a, Special("float", "minus_inf")),
        {"dtype": Special("dtype", "float32")},
    )
    return Graph(("x",), ("w", "bias"), (first, second, third, fourth), (Ref("c"), Ref("a"), 3))


def test_graph_round_trips() -> None:
    graph = _graph()
    assert Graph.from_json(graph.to_json()) == graph
    assert graph.users() == {
        "x": ("a",),
        "w": ("a", "b"),
        "bias": ("b",),
        "a": ("b", "d", ""),
        "b": ("c",),
        "c": ("",),
        "d": (),
    }
    assert graph.nodes[1].conv_inputs() == ("a", "w", "bias", "a")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "nodes.1.args",
            [{"ref": "a"}, {"ref": "w"}, {"ref": "bias"}, {"ref": "z"}],
            "'z', which nothing before it gives",
        ),
        ("nodes.1.name", "a", "stands for two values"),
        ("outputs", [{"ref": "q"}], "'q' is given by no node"),
        ("nodes.0.conv", None, "a conv node has a Conv"),
        ("nodes.1.args", [{"ref": "a"}, {"ref": "w"}], "takes x, weight, bias and residual"),
        ("nodes.2.op", "system", "operator 'system' is not one"),
        ("nodes.2.op", "aten.relu_.default", "is not one aerogel calls"),
        ("nodes.2.op", "aten.from_file.default", "is not one aerogel calls"),
        ("nodes.2.op", "aten.add.__class__.x", "is not one aerogel calls"),
        ("nodes.2.args", "b", "should be a list"),
        ("nodes.3.args", [{"ref": "a"}, {"eval": "1"}], "is not an argument torch takes"),
        ("format", "2", "is not aerogel-graph-1"),
    ],
)
def test_graph_refuses_what_cannot_run(path: str, value: object, says: str) -> None:
    damaged = json.loads(_graph().to_json())
    *parents, last = path.split(".")
    inner = damaged
    for step in parents:
        inner = inner[int(step) if step.isdigit() else step]
    inner[last] = value
    with pytest.raises((InvalidFile, UnsupportedModel), match=says):
        Graph.from_json(json.dumps(damaged))


def test_names_of_earlier_versions_are_read() -> None:
    for old, now in (("leaky-0.1", "leaky_relu-0.1"), ("above0.25", "threshold0.25")):
        assert Conv.parse(f"c3k4r1s1u1p0+bias+{old}") == Conv.parse(f"c3k4r1s1u1p0+bias+{now}")


def test_plan_round_trips() -> None:
    timing = Timing.of([10.0, 11.0, 12.0], [20.0, 22.0, 24.0])
    assert (timing.min_us, timing.p50_us, timing.ratio_p25, timing.rounds) == (10.0, 11.0, 2.0, 3)
    config = Config.make("direct", vectors=7)
    choice = Choice(
        "layer1.conv",
        "conv2d",
        Conv.parse("c3k8r3s3u1p1"),
        config,
        sparsity=0.9,
        reason="why",
        tried=(Tried(config, timing),),
        refused=(Refusal("tilewise", "no tiles"),),
        in_network=timing,
    )
    plan = Plan(host(), (choice,), timing, onnxruntime=Beside(30.0, 10.0), differed="at other sizes")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InvalidFile):
        Plan.from_json(plan.to_json().replace("vectors=7", "vectors=x"))
    busy = timing.ranged([10.0, 11.0, 12.0], [20.0, 33.0, 24.0], disturbed=True)
    told = replace(
        plan,
        choices=(replace(choice, work=0.1),),
        model=busy,
        onnxruntime=Beside(30.0, 10.0, True),
        openvino=Beside(20.0, 10.0),
    )
    assert Plan.from_json(told.to_json()) == told
    for damage in ([1.0], [1.0, "x"], [1.0, -2.0], 3.0):
        raw = json.loads(told.to_json())
        raw["model"]["ratio_range"] = damage
        with pytest.raises(InvalidFile):
            Plan.from_json(json.dumps(raw))


def test_plans_of_earlier_versions_are_read() -> None:
    """They do not say how ratios scatter, nor what a kernel multiplies."""
    timing = Timing.of([10.0, 11.0], [20.0, 22.0])
    choice = Choice(
        "a", "a", Conv(4, 4), Config.make("direct"), tried=(Tried(Config.make("direct"), timing),)
    )
    plan = Plan(host(), (choice,), timing, onnxruntime=Beside(30.0, 10.0))
    raw = json.loads(plan.to_json())
    del raw["openvino"], raw["choices"][0]["work"], raw["onnxruntime"]["disturbed"]
    assert set(raw["model"]) == {"min_us", "p25_us", "p50_us", "rounds", "ratio_p25", "ratio_p50"}
    assert Plan.from_json(json.dumps(raw)) == plan


def test_a_timing_has_a_round() -> None:
    with pytest.raises(InvalidArgument, match="at least one round"):
        Timing.of([], [])
