"""int8: what a byte means, whole networks in bytes, files, and what is said in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from typer.testing import CliRunner

import aerogel
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.capture import interpret
from aerogel.capture.int8 import meanings
from aerogel.cli.main import app
from aerogel.codegen.cpu import bytewise, llvm
from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, PlanMismatch
from aerogel.ir import (
    GRAPH,
    INT8,
    Conv,
    Graph,
    Node,
    Plan,
    Quantized,
    Ref,
    Requantize,
    Target,
    here_levels,
    host,
)
from aerogel.ir.tensors import in_bytes as in_torch
from aerogel.methods import BASELINE, METHODS, cpu_form
from aerogel.methods.quads import cpu as form
from aerogel.reference import in_bytes
from aerogel.tune.quantize import MOST
from aerogel.tune.whole import faster
from tests import counts
from tests.reference_backend import Reference
from tests.small_models import sparse
from tests.suite import run
from tests.suite.cases import case


class Block(nn.Module):
    """A residual block with a stride, and a map that is laid beside another."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, k, 3, 2, 1), nn.Conv2d(k, k, 3, 1, 1)
        self.around, self.wide = nn.Conv2d(c, k, 1, 2), nn.Conv2d(k, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b(nn.functional.leaky_relu(self.a(x), 0.1)) + self.around(x))
        return torch.cat([y, nn.functional.relu6(self.wide(y))], 1)


def network() -> nn.Module:
    torch.manual_seed(7)
    body = nn.Sequential(nn.Conv2d(3, 10, 3, 1, 1), nn.Hardswish(), nn.MaxPool2d(3, 2, 1), Block(10, 16))
    tail = [nn.Upsample(scale_factor=2), nn.Conv2d(24, 12, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return sparse(nn.Sequential(body, *tail, nn.Linear(12, 5)), 0.6)


def images(count: int, *size: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 3, *size) for _ in range(count)]


@pytest.fixture(scope="module")
def fast() -> Any:
    return aerogel.compile(
        network(), images(1, 20, 22)[0], dtype="int8", calibration=images(4, 20, 22), tune="off"
    )


def meant(fast: Any, x: Tensor) -> Tensor:
    """What torch answers with the same bytes."""
    net = fast.network
    values = interpret.run(net.graph, net.real(), [x])
    found: Tensor = net.outputs(values)[0]
    return found


@pytest.mark.parametrize(("low", "high"), [(0.0, 6.0), (-1.0, 3.0), (-5.0, -1.0), (2.0, 3.0), (0.0, 0.0)])
def test_bytes_hold_zero_and_are_near(low: float, high: float) -> None:
    how = Quantized.of(low, high)
    x = np.linspace(min(low, 0), max(high, 0), 1001).astype(np.float32)
    assert how.numbers_of(how.bytes_of(np.zeros(1))) == 0
    assert np.abs(how.numbers_of(how.bytes_of(x)) - x).max() <= how.scale * 0.5001


@pytest.mark.parametrize("seed", range(12))
def test_torch_computes_the_same_bytes(seed: int) -> None:
    """In parts that floats hold exactly, however many products a sum has."""
    rng = np.random.default_rng(seed)
    c = (4, 40, 1200)[seed % 3]
    conv = Conv(c, 5, 3, 3, pad=(1, 1, 0, 1), dtypes=INT8, epilogue=("bias", "relu"), n=1, h=4, w=5)
    weight = rng.integers(-128, 128, conv.weight_shape).astype(np.int8)
    x = rng.integers(0, 256, conv.x_shape).astype(np.uint8)
    how = Requantize(
        rng.integers(-999, 999, conv.k).astype(np.int32), np.full(conv.k, 3e-4, np.float32), 77, 13
    )
    got = in_torch(torch.from_numpy(x), torch.from_numpy(weight), conv, torch.from_numpy(how.words), None)
    np.testing.assert_array_equal(got.numpy(), in_bytes(x, weight, conv, how))


@pytest.mark.parametrize("seed", range(8))
def test_onnx_means_the_same(seed: int) -> None:
    """QLinearConv of onnxruntime on the same scales: equal, but for a byte in a thousand where its product of
    scales is rounded elsewhere."""
    rng = np.random.default_rng(seed)
    groups = 1 + seed % 2
    conv = Conv(8, 6, 3, 3, (1 + seed % 2,) * 2, (1, 1, 1, 1), groups=groups, dtypes=INT8, n=2, h=9, w=7)
    conv = replace(conv, epilogue=("bias",))
    x = rng.integers(0, 256, conv.x_shape).astype(np.uint8)
    weight = rng.integers(-60, 60, conv.weight_shape).astype(np.int8)
    scales = (rng.random(conv.k) * 0.01 + 0.001).astype(np.float32)
    bias = rng.integers(-3000, 3000, conv.k).astype(np.int32)
    own, other = Quantized(0.02, 100 + seed), Quantized(0.1, 30 * (seed % 4))
    arrays: dict[str, Any] = {
        "xs": np.float32(own.scale), "xz": np.uint8(own.zero), "w": weight, "ws": scales,
        "wz": np.zeros(conv.k, np.int8), "ys": np.float32(other.scale), "yz": np.uint8(other.zero), "b": bias,
    }  # fmt: skip
    held = [helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype), np.shape(a),
                               np.asarray(a).tobytes(), raw=True) for n, a in arrays.items()]  # fmt: skip
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"]
    node = helper.make_node(
        "QLinearConv", names, ["y"], strides=list(conv.stride), pads=[1] * 4, group=groups
    )
    values = [helper.make_tensor_value_info(n, TensorProto.UINT8, None) for n in "xy"]
    graph = helper.make_graph([node], "g", [values[0]], [values[1]], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x})
    numbers = bias.astype(np.float64) * own.scale * scales
    how = Requantize.of(weight, scales, numbers, own, other)
    got = in_bytes(x, weight, conv, how)
    apart = np.abs(got.astype(int) - wanted.astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() <= 1e-3


def test_words_come_back_and_bad_ones_are_refused() -> None:
    scales = np.array([0, 0.1, 0.2, 0.5, 3], np.float32)
    how = Requantize(np.arange(5, dtype=np.int32), scales, 1, 2, 3, 250, 0.5, 9, 0.1)
    words = how.words
    again = Requantize.parse(words, 5)
    np.testing.assert_array_equal(again.words, words)
    assert (again.x_zero, again.zero, again.low, again.high, again.beside_zero) == (1, 2, 3, 250, 9)
    for at, value in ((0, 256), (1, -1), (2, 251), (5, 0x7F800000), (6, 0), (16 + 1, 0x7FC00000)):
        bad = words.copy()
        bad[at] = value
        with pytest.raises(InvalidFile, match="requantisation"):
            Requantize.parse(bad, 5)
    for other in (words[:-1], words.astype(np.int64), words.reshape(2, -1)):
        with pytest.raises(InvalidFile, match="5 filters"):
            Requantize.parse(other, 5)


@pytest.mark.parametrize("level", [level for level in ("avx512", "avx2") if level in here_levels()])
def test_the_one_instruction_form_is_right_and_is_one_instruction(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine here may have it: it is compiled and looked at, and run with the instruction written out."""
    extra = {"avx512": "avx512vnni", "avx2": "avxvnni"}[level]
    code = bytewise.BytesCode(level, "vnni", 4, ("bias", "relu"))
    assert code.extra == extra
    made = llvm.object_code(bytewise.emit(code), level, extra)
    assert (b"\x62" if level == "avx512" else b"\xc4") in made
    assert made.count(b"\x50") >= 4 * 5, "vpdpbusd: four vectors, unrolled four times, and the rest"
    plain = llvm.object_code(bytewise.emit(replace(code, form="pairs")), level)
    assert len(made) < len(plain)
    emit = bytewise.emit
    monkeypatch.setattr(bytewise, "emit", lambda code: emit(code, emulated=code.form == "vnni"))
    build = llvm.function
    monkeypatch.setattr(
        llvm, "function", lambda name, entry, text, isa, extra="": build(f"emulated {name}", entry, text, isa)
    )
    here = host().lower(level)
    target, ran = replace(here, extras=tuple(sorted({*here.extras, extra}))), 0
    many = min(40, counts.count("bytes", 0.15))
    for seed in range(many):
        one = case("bytes", seed, 4)
        assert run.faults(cpu_form("quads"), target, one, run.Expected(one)) is None, run.describe(
            "quads", level, one
        )
        ran += 1
    assert ran == many


def test_code_for_the_instruction_is_refused_without_it() -> None:
    if "avx512vnni" in host().extras:
        pytest.skip("this machine has it")
    code = bytewise.BytesCode("avx512", "vnni", 2)
    with pytest.raises(PlanMismatch, match="with avx512vnni"):
        llvm.function(str(code), bytewise.ENTRY, lambda: bytewise.emit(code), code.isa, code.extra)


def test_floats_and_bytes_are_told_apart() -> None:
    """quads takes bytes and nothing else; every other method the rest. A filter whose sums might not fit is
    refused."""
    conv = Conv.parse("n1c8h9w9k8r3s3u1p1:int8+bias+relu")
    assert Conv.parse(str(conv)) == conv
    stats = run.worth_it(np.ones(conv.weight_shape, np.int8))
    for name in METHODS:
        why = cpu_form(name).refuse(conv, host(), stats)
        assert (why is None) == (name in ("quads", BASELINE)), name
    assert "bytes" in str(form.refuse(Conv.parse("n1c8h9w9k8r3s3u1p1"), host(), stats))
    assert "may not fit" in str(form.refuse(replace(conv, c=4000), host(), stats))
    assert "silu" in str(form.refuse(replace(conv, epilogue=("bias", "silu")), host(), stats))
    for text in ("u8", "u8.s8.f32.u8", "f32.s8.s32.f32"):
        with pytest.raises(AerogelError):
            Conv.parse(f"c8k8r1s1u1p0:{text}")


def test_a_network_in_bytes_answers_as_its_bytes_mean(fast: Any) -> None:
    """Bit for bit up to the last map, at every batch and size; what int8 loses is little."""
    layers = [c for c in fast.plan.choices if c.conv.dtypes == INT8]
    assert len(layers) == 6
    assert all(c.config.method == "quads" for c in layers)
    model = network()
    for n, h, w in ((2, 20, 22), (1, 20, 22), (3, 33, 17), (9, 12, 12)):
        x = torch.randn(n, 3, h, w)
        got, wanted, exact = fast(x), meant(fast, x), model(x)
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (got - exact).norm() <= 0.1 * exact.norm()


def test_the_last_map_is_the_same_bytes() -> None:
    body = sparse(nn.Sequential(nn.Conv2d(3, 9, 3, 2, 1), nn.ReLU(), nn.Conv2d(9, 7, 3)), 0.5)
    x = images(1, 16, 18)[0]
    fast = aerogel.compile(body, x, dtype="int8", calibration=images(3, 16, 18), tune="off")
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(1 + seed % 2, 3, 16 + seed, 18)
        assert torch.equal(fast(x), meant(fast, x))


def test_timed_and_saved(tmp_path: Path) -> None:
    """Compiled by measurement, saved, loaded here, on a lesser CPU and tuned again: the same bytes."""
    model, x = network(), images(1, 20, 22)[0]
    fast = aerogel.compile(
        model, x, dtype="int8", calibration=images(3, 20, 22), tune=2.0, store=tmp_path / "store"
    )
    if fast.how != GRAPH:  # torch was faster, beside whatever else runs here
        fast = aerogel.compile(model, x, dtype="int8", calibration=images(3, 20, 22), tune="off")
    aerogel.save(fast, tmp_path / "m.aero")
    loaded = aerogel.load(tmp_path / "m.aero")
    assert torch.equal(loaded(x), fast(x))
    report = str(aerogel.explain(loaded))
    assert "int8" in report
    wanted = fast(x)
    for level in here_levels()[1:]:
        with using(Cpu(replace(host().lower(level), threads=torch.get_num_threads()))):
            other = aerogel.load(tmp_path / "m.aero")
            assert any("int8 as it was saved" in note for note in other.notes)
            assert (other(x) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    again = aerogel.load(tmp_path / "m.aero", tune=1.0, store=tmp_path / "store")
    assert (again(x) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_layers_that_lose_too_much_stay_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One filter a thousand times as large as the others: their bytes are all alike then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, bias=False)).eval()
    weight: Any = model[0].weight
    weight.data[0] *= 3000
    other: Any = model[1].weight
    other.data[:, 0] = 0
    fast = aerogel.compile(
        model, images(1, 12, 12)[0], dtype="int8", calibration=images(3, 12, 12), tune="off"
    )
    assert [c.conv.dtypes == INT8 for c in fast.plan.choices] == [True, False]
    assert fast.notes[0].startswith("1 layers in int8; one alone loses at most")
    assert fast.notes[1].startswith("1: stays f32, in int8 it would lose")


def test_mistakes_are_sentences() -> None:
    model, x = network(), images(1, 20, 22)[0]
    with pytest.raises(InvalidArgument, match=r"int8 needs real inputs: compile\(model, x"):
        aerogel.compile(model, x, dtype="int8")
    with pytest.raises(InvalidArgument, match="no bytes can hold those"):
        aerogel.compile(model, x, dtype="int8", calibration=[x, torch.full_like(x, float("nan"))])
    with pytest.raises(InvalidArgument, match='bfloat16 or "int8"'):
        aerogel.compile(model, x, dtype="int4")


def test_a_graph_that_lies_about_its_bytes_is_refused(fast: Any) -> None:
    """From a file: bytes that mean nothing, scales that are none, a requantisation of another layer."""
    graph, constants = fast.network.graph, fast.network.real()
    first = next(n for n in graph.nodes if n.conv is not None)
    bare = Graph(
        ("q",), graph.constants, (replace(first, args=(Ref("q"), *first.args[1:])),), (Ref(first.name),)
    )
    with pytest.raises(InvalidFile, match="nothing says the meaning of"):
        meanings(bare, constants)
    for args in ((Ref("x"), 0.0, 3), (Ref("x"), 1.0, 256), (Ref("x"), 1.0), (Ref("x"), float("inf"), 0)):
        with pytest.raises(InvalidFile, match="a scale and a zero point"):
            Node("q", "quantize", args)
    with pytest.raises(InvalidFile, match="no requantisation"):
        replace(first, conv=replace(first.conv, epilogue=()), args=first.args[:2])
    words = first.conv_inputs()[2]
    with pytest.raises(InvalidFile, match="no requantisation of"):
        meanings(graph, {**constants, str(words): torch.zeros(3, dtype=torch.int32)})
    assert Graph.from_json(graph.to_json()) == graph


def test_explain_says_what_int8_costs_each_layer(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lost = {c.layer: c.lost for c in fast.plan.choices}
    in_int8 = {c.layer for c in fast.plan.choices if c.conv.dtypes == INT8}
    assert {name for name, share in lost.items() if share is not None} == in_int8
    assert all(0 < lost[name] <= MOST for name in in_int8)
    assert [c.lost for c in Plan.from_json(fast.plan.to_json()).choices] == list(lost.values())
    said = str(aerogel.explain(fast))
    assert "int8 loses" in said
    assert said.count("in floats") == len(lost) - len(in_int8)
    one = next(iter(in_int8))
    assert f"int8 costs it {lost[one]:.2%} of its output" in str(aerogel.explain(fast, layer=one))


def test_floats_stay_where_they_are_faster() -> None:
    """The clock says which of the two that is."""
    x, made = images(1, 20, 22)[0], []
    backends = Reference({}), Reference({})
    for backend in backends:
        with using(backend):
            made.append(aerogel.compile(nn.Conv2d(3, 2, 1).eval(), x, tune="off"))
    slow, quick = made

    def clock(run: Callable[[], object], repeats: int) -> float:
        before = backends[1].ran
        run()
        return 10e3 if backends[1].ran > before else 40e3

    asked: Any = SimpleNamespace(backend=SimpleNamespace(clock=clock))
    assert faster(quick, slow, ((x,), {}), asked) is quick
    assert faster(slow, quick, ((x,), {}), asked) is quick
    assert quick.notes[-1].startswith("stays in floats: they take 10.0 ms here, int8 40.0 ms")


def test_what_is_chosen_on_an_older_cpu_is_what_is_said() -> None:
    """On a CPU without an instruction for it, int8 is timed beside floats."""
    x = images(1, 20, 22)
    older = host().lower("avx2") if "avx2" in here_levels() else Target("generic")
    with using(Cpu(replace(older, threads=torch.get_num_threads()))):
        fast = aerogel.compile(network(), x[0], dtype="int8", calibration=x, tune=1.0)
    told = any("stays in floats" in note for note in fast.notes)
    assert told == all(choice.conv.dtypes != INT8 for choice in fast.plan.choices)


def test_the_command_line_quantizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())\n"
    )
    np.savez("inputs.npz", x=np.random.default_rng(0).standard_normal((8, 3, 12, 12)).astype(np.float32))
    asked = ["compile", "net:build", "-o", "m.aero", "--shape", "x=1x3x12x12", "--tune", "off", "--quiet"]
    done = CliRunner().invoke(app, [*asked, "--dtype", "int8", "--calibration", "inputs.npz", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["file"] == "m.aero"
    assert [c.conv.dtypes for c in aerogel.load("m.aero").plan.choices] == [INT8]
    refused = CliRunner().invoke(app, [*asked, "--dtype", "int8"])
    assert refused.exit_code == 2
    assert "--calibration" in refused.output
