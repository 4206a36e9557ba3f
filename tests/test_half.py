"""Half precision: what is stored, what is summed, what stays as it was; answers no further off than dense
bf16's."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from aerogel.backends.cpu.lower import features, pooling
from aerogel.backends.cpu.lower.convert import convert
from aerogel.backends.cpu.threads import Segment
from aerogel.capture.half import Half, halved
from aerogel.capture.nodes import pooling_of
from aerogel.errors import AerogelError
from aerogel.ir import (
    Conv,
    Dtypes,
    Graph,
    Layout,
    Node,
    Plan,
    Ref,
    Stats,
    Target,
    from_float64,
    here_levels,
    host,
    to_float64,
)
from aerogel.methods import cpu_form
from aerogel.reference import reference
from aerogel.runtime.eager import InType, bodies
from tests.small_models import Fancy, Looping, Small, runs, sparse

HALVES = [torch.float16, torch.bfloat16]
ABLE = [isa for isa in here_levels() if isa != "generic"]  # plain x86-64 cannot convert fp16


def close(model: nn.Module, fast: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
    """Network error against float64 no larger than that of the dense model in bf16 (and a little, where that
    is exact)."""
    with torch.no_grad():
        plain = InType(model, torch.bfloat16)(*args, **kwargs)
        exact = copy.deepcopy(model).double()(
            *(a.double() for a in args), **{k: v.double() for k, v in kwargs.items()}
        )
        got = fast(*args, **kwargs)
    leaves = [torch.utils._pytree.tree_leaves(v) for v in (plain, exact, got)]
    for p, x, g in zip(*leaves, strict=True):
        assert g.dtype == torch.float32
        assert (g - x).abs().max() <= (p - x).abs().max() * 1.2 + 2e-3 * x.abs().max()
    return got


@pytest.fixture(scope="module")
def small() -> Any:
    return sparse(Small())


@pytest.mark.parametrize("dtype", HALVES)
def test_a_network_in_half_is_one_segment(small: Any, dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(small, x, dtype=dtype, tune="off")
    close(small, fast, x)
    (program,) = runs(fast).programs.values()
    assert [part.node for part in program.parts] == [None]  # casts are no steps: each is part of a copy
    kernels = [step.kernel for step in program.parts[0].natives]
    kind = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert kernels[0].reads.dtype == "f32"  # the image, cut into phases and rounded in one go
    assert {k.writes.dtype for k in kernels[:-1]} == {kind}
    assert kernels[-1].writes.dtype == "f32"
    for arena in runs(fast).memory.arenas:
        arena.buffer.view(np.uint16)[:] = 0x7FFF  # NaN in both types
    close(small, fast, x)


@pytest.mark.parametrize("dtype", HALVES)
def test_other_batches_and_sizes(small: Any, dtype: torch.dtype) -> None:
    fast = aerogel.compile(small, torch.randn(1, 3, 64, 64), dtype=dtype, tune="off")
    for shape in ((2, 3, 64, 64), (7, 3, 64, 64), (1, 3, 96, 40)):
        close(small, fast, torch.randn(shape))


def test_timed_compile_in_half_is_close_and_replays(small: Any, tmp_path: Any) -> None:
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(small, x, dtype=torch.float16, tune="fast", store=tmp_path)
    close(small, fast, x)
    again = aerogel.compile(small, x, dtype=torch.float16, tune="fast", store=tmp_path)
    assert "from the store" in str(aerogel.explain(again))
    replayed = aerogel.compile(small, x, dtype=torch.float16, plan=Plan.from_json(fast.plan.to_json()))
    if str(fast.how) == "graph":
        assert torch.equal(fast(x), replayed(x))
        assert torch.equal(fast(x), again(x))
    assert all(c.conv.dtypes.input == "f16" for c in fast.plan.choices)
    whole = aerogel.compile(small, x, tune="off")
    assert all(c.conv.dtypes == Dtypes() for c in whole.plan.choices)  # precision never changes unasked


def test_new_weights_and_copies_stay_half(small: Any) -> None:
    model, x = copy.deepcopy(small), torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(model, x, dtype=torch.float16, tune="off")
    state = {
        k: v * 1.5 if v.is_floating_point() and v.dim() == 4 else v.clone()
        for k, v in model.state_dict().items()
    }
    fast.load_state_dict(state)
    model.load_state_dict(state)
    close(model, fast, x)
    assert fast.network is not None
    assert {n.conv.dtypes.input for n in fast.network.convs() if n.conv is not None} == {"f16"}
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))


@pytest.mark.parametrize("dtype", HALVES)
def test_inputs_outputs_and_what_torch_keeps(dtype: torch.dtype) -> None:
    model = sparse(Fancy())
    args, kwargs = (torch.randn(1, 3, 12, 14), torch.randn(1, 8, 12, 14)), {"scale": torch.rand(1, 8, 1, 1)}
    fast = aerogel.compile(model, args, kwargs, dtype=dtype, tune="off")
    close(model, fast, *args, **kwargs)


class Large(nn.Module):
    """Its middle layer gives numbers beyond fp16's 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(c, k, 3, padding=1) for c, k in ((3, 16), (16, 16), (16, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))) * 1e-6)  # type: ignore[no-any-return]


def test_a_layer_that_overflows_stays_f32_by_name() -> None:
    model = sparse(Large())
    with torch.no_grad():
        model.get_parameter("b.weight").mul_(1e5)
    x = torch.randn(1, 3, 20, 20)
    fast = aerogel.compile(model, x, dtype=torch.float16, tune="off")
    close(model, fast, x)
    said = str(aerogel.explain(fast))
    assert "b: stays f32" in said
    assert "a: stays" not in said
    assert {c.layer: c.conv.dtypes.output for c in fast.plan.choices} == {"a": "f16", "b": "f32", "c": "f16"}
    calm = sparse(Large())
    assert "stays" not in str(aerogel.explain(aerogel.compile(calm, x, dtype=torch.float16, tune="off")))
    called = aerogel.compile(
        calm, x, dtype=torch.float16, tune="off", calibration=[x, 1e6 * torch.randn(2, 3, 24, 16)]
    )
    assert "b: stays f32" in str(aerogel.explain(called))  # what the example did not show, other inputs do


def test_a_model_that_is_half_already_keeps_its_sums() -> None:
    model, x = sparse(Small()).half(), torch.randn(1, 3, 64, 64).half()
    fast = aerogel.compile(model, x, tune="off")
    exact = copy.deepcopy(model).double()(x.double())
    assert fast(x).dtype == torch.float16
    assert (fast(x) - exact).abs().max() <= 2 * (model(x) - exact).abs().max() + 1e-3 * exact.abs().max()
    assert {str(c.conv.dtypes) for c in fast.plan.choices} == {"f16"}  # f32 sums, as torch has them
    assert all(part.natives for part in next(iter(runs(fast).programs.values())).parts)


class Widened(nn.Module):
    """Half at first, then cut into pieces of a map that exists in f32 only on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1).half(), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x.half()).float().chunk(2, 1)
        return self.b(left) + right  # type: ignore[no-any-return]


def test_pieces_of_a_cast() -> None:
    model, x = sparse(Widened()), torch.randn(1, 3, 12, 20)
    fast = aerogel.compile(model, x, tune="off")
    assert str(fast.how) == "graph"
    assert (fast(x) - model(x)).abs().max() < 1e-2
    assert {c.conv.dtypes.input for c in fast.plan.choices} == {"f16", "f32"}


def test_in_parts() -> None:
    model, x = sparse(Looping()), torch.randn(1, 16, 20, 20)
    close(model, aerogel.compile(model, x, dtype=torch.float16, tune="off"), x)


def test_what_half_cannot_be_is_said() -> None:
    with pytest.raises(AerogelError, match=r"torch\.float16"):
        aerogel.compile(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), dtype=torch.float64)


def test_every_form_of_torch_is_beside_ours() -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    forms = bodies(model, torch.bfloat16)
    assert list(map(str, forms)) == [
        "contiguous",
        "channels_last",
        "contiguous bfloat16",
        "channels_last bfloat16",
    ]
    assert {f(x).dtype for f in forms.values()} == {torch.float32}
    own = bodies(model.to(torch.bfloat16), torch.bfloat16)
    assert list(bodies(model, None)) == list(own)
    assert list(map(str, own)) == ["contiguous", "channels_last"]


def test_casts_stand_once_where_types_meet() -> None:
    conv = Conv(4, 4)
    nodes = (
        Node("a", "conv", (Ref("x"), Ref("w")), {}, conv, "first"),
        Node("p", "aten.max_pool2d.default", (Ref("a"), (2, 2))),
        Node("s", "aten.sigmoid.default", (Ref("p"),)),
        Node("b", "conv", (Ref("p"), Ref("w")), {}, conv, "second"),
        Node("c", "conv", (Ref("s"), Ref("w")), {}, conv, "third"),
        Node("d", "aten.mul.Tensor", (Ref("p"), Ref("c"))),
    )
    graph = Graph(("x",), ("w",), nodes, (Ref("b"), Ref("d")))
    kinds = dict.fromkeys((*"xwapsbcd",), "f32")
    half = Half(Dtypes("f16", "f16", "f16", "f16"), kinds, frozenset({"third"}))
    made, constants = halved(graph, {"w": torch.ones(4, 4, 1, 1)}, half)
    reads = {n.name: n.inputs for n in made.nodes}
    assert reads["p"] == ("a",)  # pooling follows
    assert reads["s"] == reads["d"][:1] == ("p#f32",)  # torch computes in f32, from one cast
    assert reads["b"] == ("p", "w#f16")
    assert reads["c"] == ("s", "w")  # a layer that stays
    assert made.outputs == (Ref("b#f32"), Ref("d"))
    assert [n for n in reads if "#" in n] == ["x#f16", "p#f32", "b#f32"]
    assert {n: t.dtype for n, t in constants.items()} == {"w": torch.float32, "w#f16": torch.float16}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("isa", ABLE)
def test_copies_round_to_nearest(kind: str, isa: str) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        shape = (
            int(rng.integers(1, 3)),
            int(rng.integers(1, 6)),
            int(rng.integers(1, 20)),
            int(rng.integers(1, 40)),
        )
        x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 5)
        kinds = ("f32", kind) if seed % 2 else (kind, "f32")
        stored = from_float64(x, kinds[0])
        source = Layout("contiguous", shape[3], dtype=kinds[0])
        target = (
            Layout("planar", shape[3] + 2, (1, 2, 1, 1), 5, kinds[1])
            if seed % 3
            else source.__class__("contiguous", shape[3], dtype=kinds[1])
        )
        xb, yb = source.allocate(shape), target.allocate(shape)
        source.write(xb, stored)
        for made in convert(shape, source, target, host().lower(isa)):
            Segment([(made, made.bind(x=xb.ctypes.data, y=yb.ctypes.data))], 1 + seed % 2)()
        assert np.array_equal(target.read(yb, shape), from_float64(to_float64(stored, kinds[0]), kinds[1]))
        assert target.kind == "contiguous" or target.dirty_border(yb, shape) == 0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("isa", ABLE)
def test_pooling_in_half(kind: str, isa: str) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, c, h, w = (int(v) for v in rng.integers((1, 1, 3, 3), (3, 5, 30, 50)))
        x = from_float64(rng.integers(-9, 9, (n, c, h, w)).astype(np.float64), kind)
        t = torch.from_numpy(to_float64(x, kind))
        if seed % 3 == 0:
            wanted, node = t.mean((2, 3), keepdim=True), Node("y", "aten.mean.dim", (Ref("x"), (2, 3), True))
        elif seed % 3 == 1:
            wanted, node = (
                F.max_pool2d(t, 3, 2, 1),
                Node("y", "aten.max_pool2d.default", (Ref("x"), (3, 3), (2, 2), (1, 1))),
            )
        else:
            wanted, node = (
                F.avg_pool2d(t, 2, 1),
                Node("y", "aten.avg_pool2d.default", (Ref("x"), (2, 2), (1, 1))),
            )
        own = pooling_of(node)
        assert own is not None
        shape = (n, c, wanted.shape[2], wanted.shape[3])
        reads, writes = (
            Layout("planar", w + 1, (1, 1, 1, 1), 16, kind),
            Layout("planar", shape[3] + 1, (1, 1, 0, 1), 3, kind),
        )
        xb, yb = reads.allocate(x.shape), writes.allocate(shape)
        reads.write(xb, x)
        made = pooling.kernel(own, x.shape, shape, reads, writes, host().lower(isa))
        scratch = np.empty(made.scratch_bytes * 2, np.uint8)
        Segment(
            [(made, made.bind(x=xb.ctypes.data, y=yb.ctypes.data, scratch=scratch.ctypes.data))], 1 + seed % 2
        )()
        got, unit = to_float64(writes.read(yb, shape), kind), {"f16": 2.0**-11, "bf16": 2.0**-8}[kind]
        assert np.allclose(got, wanted.numpy(), rtol=1.01 * unit, atol=0), f"seed {seed}"
        assert writes.dirty_border(yb, shape) == 0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("isa", ABLE)
def test_a_dense_head_in_half(kind: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        c, k = int(rng.integers(1, 200)), int(rng.integers(1, 40))
        conv = Conv(c, k, dtypes=Dtypes.of(kind), epilogue=("bias", "add", "relu"), n=1 + seed % 2, h=1, w=1)
        weight, x, residual = (
            rng.integers(-3, 3, s).astype(np.float64) for s in (conv.weight_shape, conv.x_shape, conv.y_shape)
        )
        bias = rng.integers(-9, 9, k).astype(np.float32)
        reads, writes = (
            Layout("planar", 3, (1, 1, 0, 1), dtype=kind),
            Layout("planar", 2, (0, 1, 1, 0), dtype=kind),
        )
        xb, yb, old = (
            reads.allocate(conv.x_shape),
            writes.allocate(conv.y_shape),
            writes.allocate(conv.y_shape),
        )
        reads.write(xb, from_float64(x, kind))
        writes.write(old, from_float64(residual, kind))
        made = features.kernel(from_float64(weight, kind), conv, reads, writes, host().lower(isa))
        scratch = np.empty(made.scratch_bytes * 2, np.uint8)
        places = {"x": xb, "y": yb, "bias": bias, "residual": old, "scratch": scratch}
        Segment([(made, made.bind(**{n: a.ctypes.data for n, a in places.items()}))], 2)()
        wanted = reference(x, weight, conv, bias.astype(np.float64), residual)
        assert np.array_equal(writes.read(yb, conv.y_shape), from_float64(wanted, kind))
        assert writes.dirty_border(yb, conv.y_shape) == 0


def test_only_short_rows_are_summed_in_fp16() -> None:
    able = Target("avx512", ("avx512fp16",))
    for name, (density, most) in product(("direct", "stridepack"), ((0.1, 512), (0.5, 128), (1.0, 64))):
        stats = Stats(512 * 512, int(512 * 512 * density))
        for kind, longest in (("f16.f16.f16.f16", most), ("f16", 512)):
            conv = Conv.parse(f"n1c512h14w14k512r1s1u1p0:{kind}")
            channels = {config["channels"] for config in cpu_form(name).configs(conv, able, stats)}
            assert max(channels) == longest or name == "stridepack"  # its tile must fit L1 as well
            assert max(channels) <= longest
