"""Every attack by file that once got through (1 to 12): refused in words, under 2 GB and 20 s of CPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import aerogel
from aerogel import disk
from aerogel.codegen.cpu import llvm
from aerogel.codegen.cpu.abi import Code
from aerogel.ir import host
from aerogel.saved import container
from tests.hostile import array, node
from tests.limited import apart, loaded
from tests.small_models import Skip, sparse

Texts = dict[str, Any]
REF = {"ref": "bad"}


REF_X = {"ref": "x"}


def _node(name: str, op: str, *args: Any, **kwargs: Any) -> Any:
    return {"name": name, "op": op, "args": list(args), "kwargs": kwargs, "conv": None, "layer": ""}


def _with(*nodes: Any) -> Callable[[Texts, Any], None]:
    """The graph gives the value "bad" beside its own."""

    def change(texts: Texts, _: Any) -> None:
        texts["graph"]["nodes"] += nodes
        texts["graph"]["outputs"].append(REF)
        texts["model"]["outputs"].append("bad")
        texts["model"]["answer"] = {"tuple": [texts["model"]["answer"], {"value": 0}]}

    return change


def _piece(proto: Any, **initializers: Any) -> Callable[[Texts, Any], None]:
    """The graph gives what a piece of ONNX gives for its input."""

    def change(texts: Texts, arrays: Any) -> None:
        info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * 4)]
        graph = helper.make_graph(
            [proto], "g", info, [helper.make_empty_tensor_value_info("y")], list(initializers.values())
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        content = torch.frombuffer(bytearray(made.SerializeToString()), dtype=torch.uint8).numpy()
        arrays["piece"] = ("uint8", content)
        texts["model"]["constants"].append("piece")
        texts["graph"]["constants"].append("piece")
        (x,) = texts["graph"]["inputs"]
        piece = _node("several", "onnx", {"ref": "piece"}, [{"ref": x}])
        _with(piece, _node("bad", "getitem", {"ref": "several"}, 0))(texts, arrays)

    return change


def _squarings(texts: Texts, arrays: Any) -> None:
    (x,) = texts["graph"]["inputs"]
    chain = [_node("n0", "aten.sym_size.int", {"ref": x}, 2)]
    chain += [_node(f"n{i + 1}", "int.mul", {"ref": f"n{i}"}, {"ref": f"n{i}"}) for i in range(44)]
    _with(*chain, _node("bad", "int.min", {"ref": "n44"}, 1))(texts, arrays)


def _written(texts: Texts, arrays: Any) -> None:
    (x,) = texts["graph"]["inputs"]
    _with(_node("bad", "aten.sub.out", {"ref": x}, {"ref": x}, out={"ref": x}))(texts, arrays)


def _trained(texts: Texts, arrays: Any) -> None:
    (x,), y = texts["graph"]["inputs"], texts["graph"]["nodes"][-1]["name"]
    mean = _node("mean", "aten.select.int", {"ref": x}, 1, 0)
    flat = _node("flat", "aten.flatten.using_ints", {"ref": "mean"})
    eight = _node("eight", "aten.narrow.default", {"ref": "flat"}, 0, 0, 8)
    norm = _node(
        "bad",
        "aten.batch_norm.default",
        {"ref": y},
        None,
        None,
        {"ref": "eight"},
        {"ref": "eight"},
        True,
        0.5,
        1.0,
        False,
    )
    _with(mean, flat, eight, norm)(texts, arrays)


def _named(texts: Texts, _: Any) -> None:
    """A plan's method is a module's name."""
    texts["model"]["points"][0]["how"] = "contiguous"
    for choice in texts["plan0"]["choices"]:
        choice["config"] = "direct.cpu/" + choice["config"].partition("/")[2]


def _wide(texts: Texts, arrays: Any) -> None:
    y = texts["graph"]["nodes"][-1]["name"]
    _with(_node("bad", "aten.max_pool2d.default", {"ref": y}, [2, 1 << 62], [1, 1], [0, 1 << 61]))(
        texts, arrays
    )


def _loop() -> Any:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", "go", outputs=["more"]), node("Identity", "v", outputs=["w"])], "b", [info("i",
        TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, None)],
        [info("more", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, None)],
    )  # fmt: skip
    return node("Loop", "n", "t", "x", body=body)


def _elsewhere() -> Any:
    held = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[12], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="secret")
    return held


ATTACKS: dict[str, Callable[[Texts, Any], None]] = {
    "1 squarings": _squarings,
    "2 loop": _piece(_loop(), n=array("n", 2**62, "int64"), t=array("t", True, "bool")),
    "3 text times a number": _with(_node("bad", "int.mul", "x", 5_000_000_000)),
    "4 text by a format": _with(_node("bad", "int.mod", "%4000000000d", 1)),
    "5 full": _with(_node("bad", "aten.full.default", [1_000_000_000], 1.0)),
    "6 constant of a shape": _piece(node("ConstantOfShape", "s"), s=array("s", [1_000_000_000], "int64")),
    "7 out=": _written,
    "8 data outside": _piece(node("Add", "x", "w"), w=_elsewhere()),
    "9 empty": _with(_node("bad", "aten.empty.memory_format", [4000])),
    "10 an element type by its number": _with(_node("bad", "aten.to.dtype", REF_X, 255)),
    "10b of a view": _with(_node("bad", "aten.view.dtype", REF_X, 255)),
    "10c a layout by its number": _with(_node("bad", "aten.contiguous.default", REF_X, memory_format=77)),
    "10d of zeros": _with(_node("bad", "aten.zeros.default", [4], dtype=255)),
    # and what lies beside them
    "3b a list times a number": _with(_node("bad", "int.mul", [1, 2], 500_000_000)),
    "5b zeros on a device": _with(_node("bad", "aten.zeros.default", [1 << 30], device={"device": "cpu"})),
    "5c expanded, then made": _with(
        _node("one", "aten.ones.default", [1, 1]),
        _node("wide", "aten.expand.default", {"ref": "one"}, [1 << 15, 1 << 15]),
        _node("bad", "aten.clone.default", {"ref": "wide"}),
    ),
    "5d cut into pieces": _with(
        _node("one", "aten.ones.default", [1], dtype={"dtype": "bool"}),
        _node("wide", "aten.expand.default", {"ref": "one"}, [1 << 25]),
        _node("many", "aten.unbind.int", {"ref": "wide"}, 0),
        _node("bad", "getitem", {"ref": "many"}, 0),
    ),
    "5e no elements, many pieces": _with(
        _node("none", "aten.zeros.default", [0, 1 << 40]),
        _node("many", "aten.split.Tensor", {"ref": "none"}, 1, 1),
        _node("bad", "getitem", {"ref": "many"}, 0),
    ),
    "5f what memory has room for": _with(_node("bad", "aten.full.default", [1 << 26], 1.0)),
    "7b averages in training": _trained,
    "9b new_empty": _with(_node("bad", "aten.new_empty.default", {"ref": "x"}, [4000])),
    "13 one of a list": _with(_node("bad", "getitem", [{"ref": "x"}, {"ref": "x"}], 0)),
    "13b one counted from the end": _with(
        _node("two", "aten.chunk.default", {"ref": "x"}, 3, 1),
        _node("bad", "getitem", {"ref": "two"}, -1),
    ),
    "14 a module for a method": _named,
    "15 a window of no pixels": _with(_node("bad", "aten.max_pool2d.default", {"ref": "x"}, [0, 0], [1, 1])),
    "15b steps of no pixels": _with(_node("bad", "aten.max_pool2d.default", {"ref": "x"}, [2, 2], [0, 0])),
    "15c a window larger than numbers": _wide,
    "another device": _with(_node("bad", "aten.zeros.default", [4], device={"device": "cuda"})),
    "a text as a type": _with(_node("bad", "aten.zeros.default", [4], dtype={"dtype": "load"})),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "m.aero"
    model = sparse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    aerogel.save(aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off"), path)
    return path


@pytest.fixture(scope="module")
def outcomes(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What came of each file that is asked for, loaded in a child of its own."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    named = [spec.params.get("name") for spec in specs if spec is not None]
    wanted = {name: change for name, change in ATTACKS.items() if name in named}
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "secret").write_bytes(b"\x00\x00\x80\x3f" * 12)
    texts, arrays = container.from_bytes(saved.read_bytes())
    onnxruntime.get_device()  # before the limit: what is imported maps much and uses little
    torch.relu(torch.empty(1, device="meta"))
    found = {}
    for name, change in wanted.items():
        parsed, own = {name: json.loads(text) for name, text in texts.items()}, dict(arrays)
        if "x" not in parsed["graph"]["inputs"]:
            parsed = json.loads(json.dumps(parsed).replace(f'"{parsed["graph"]["inputs"][0]}"', '"x"'))
        running = copy.deepcopy(parsed)
        parsed["model"]["network"] = None  # as older versions wrote it
        change(parsed, own)
        _as_it_runs(running, own, change)
        for kind, made in (("", parsed), (RUNS, running)):
            content = container.to_bytes({name: json.dumps(p) for name, p in made.items()}, own)
            (folder / "m.aero").write_bytes(content)
            with contextlib.chdir(folder):
                found[name + kind] = apart(lambda: loaded("m.aero"))
    return found


RUNS = ", in the graph that runs"


def _as_it_runs(texts: Texts, arrays: Any, change: Callable[[Texts, Any], None]) -> None:
    """The change in the graph as it was captured and in the one that runs."""
    view = {**texts, "graph": texts["network"], "model": copy.deepcopy(texts["model"])}
    change(view, arrays)
    change(texts, arrays)
    known = texts["model"]["network"]["constants"]
    known |= {name: name for name in texts["network"]["constants"] if name in arrays and name == "piece"}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_model_is_refused(name: str, outcomes: dict[str, Any]) -> None:
    """Also when it was called: what came back, and what became of the caller's tensor, would be said."""
    for kind in ("", RUNS):
        assert outcomes[name + kind]["kind"] == "refused", outcomes[name + kind]


def test_the_file_itself_is_good(saved: Path) -> None:
    assert loaded(str(saved))["kind"] == "valid"


def test_several_values_at_once_are_one_argument(saved: Path, tmp_path: Path) -> None:
    """torch takes the list that chunk gives; so do we."""
    texts, arrays = container.from_bytes(saved.read_bytes())
    parsed = {name: json.loads(text) for name, text in texts.items()}
    parsed["model"]["network"] = None
    last = parsed["graph"]["nodes"][-1]["name"]
    cut = _node("two", "aten.chunk.default", {"ref": last}, 2, 1)
    _with(cut, _node("bad", "aten.cat.default", {"ref": "two"}, 1))(parsed, arrays)
    content = container.to_bytes({name: json.dumps(p) for name, p in parsed.items()}, arrays)
    (tmp_path / "m.aero").write_bytes(content)
    found = loaded(str(tmp_path / "m.aero"))
    assert found["kind"] == "valid", found
    assert found["gave"][0] == found["gave"][1]


def _adds(number: int, name: str = "attacked") -> Code:
    text = f"define double @adds(double %x) {{ %y = fadd double %x, {float(number)}\n ret double %y }}"
    return llvm.function(name, "adds", lambda: text, "generic")


def _answer(code: Code | int) -> float:
    address = code if isinstance(code, int) else code.address
    return float(ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(address)(1.0))


def _folder_for_all(entry: Path) -> None:
    entry.parent.chmod(0o777)


def _file_for_all(entry: Path) -> None:
    entry.chmod(0o666)


def _group_above(entry: Path) -> None:
    entry.parent.parent.parent.chmod(0o775)


def _of_another(entry: Path) -> None:
    os.chown(entry, 54321, 54321)


def _folder_of_another(entry: Path) -> None:
    os.chown(entry.parent.parent, 54321, 54321)


def _a_link(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to(entry.with_name("elsewhere"))


@pytest.mark.parametrize(
    "opened", [_folder_for_all, _file_for_all, _group_above, _of_another, _folder_of_another, _a_link]
)
def test_10_code_that_others_could_have_written_is_not_run(
    opened: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if host().isa == "neon":
        pytest.skip("x86-64 code")
    if "another" in opened.__name__ and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(disk, "_said", set())
    (tmp_path / "above").mkdir()

    def anew() -> None:
        monkeypatch.setattr(llvm, "_loaded", {})
        monkeypatch.setattr(llvm, "_jit", [])

    anew()
    assert _answer(_adds(1)) == 2
    (entry,) = (tmp_path / "above" / "cache" / "objects").glob("*.o")
    poison = llvm.object_code("define double @adds(double %x) { ret double 666.0 }", "generic")
    entry.write_bytes(hashlib.sha256(poison).digest() + poison)
    anew()
    assert _answer(_adds(1)) == 666, "the user's own cache is believed"
    opened(entry)
    anew()
    assert _answer(_adds(1)) == 2
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    if "for_all" in opened.__name__ or "group" in opened.__name__:
        assert "chmod go-w" in said[0]


def test_10_a_cache_of_roots_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make root's folder")
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path))
    assert disk.compiled("known", lambda: b"code") == b"code"
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(disk, "_said", set())
    assert disk.compiled("known", lambda: pytest.fail("made again")) == b"code"
    assert disk.compiled("new", lambda: b"other") == b"other"
    assert {p.name for p in (tmp_path / "objects").iterdir()} == {"known"}


def test_11_a_record_that_runs_the_model_in_no_known_way_is_a_miss(tmp_path: Path) -> None:
    model, x = sparse(Skip(), 0.9), torch.randn(1, 3, 20, 20)
    aerogel.compile(model, x, tune="fast", store=tmp_path)
    (path,) = tmp_path.glob("*/models/*/*.json")
    good = json.loads(path.read_text())
    names = [c["node"] for c in good["body"]["plan"]["choices"]]
    for how, nodes in (
        ("contiguous xyz", names), ("contiguous float16", names), ("", names), ("graph ", names),
        (["graph"], names), ("graph", names[::-1]), ("graph", [*names[:-1], "none"]),
    ):  # fmt: skip
        forged = copy.deepcopy(good["body"])
        forged["how"] = how
        for choice, name in zip(forged["plan"]["choices"], nodes, strict=True):
            choice["node"] = name
        digest = hashlib.sha256(json.dumps(forged, sort_keys=True).encode()).hexdigest()
        for other in path.parent.iterdir():
            other.unlink()
        path.write_text(json.dumps({"format": good["format"], "digest": digest, "body": forged}))
        fast = aerogel.compile(model, x, tune="fast", store=tmp_path)
        assert "from the store" not in str(aerogel.explain(fast)), how
        assert (fast(x) - model(x)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "text", ["\x1b[2J\x1b]0;owned\x07", "a\nb\rc", "\u202eevil\u2066", "\x9b31m\x7f\u2028"]
)
def test_text_from_a_file_is_harmless_on_a_terminal(saved: Path, tmp_path: Path, text: str) -> None:
    texts, arrays = container.from_bytes(saved.read_bytes())
    parsed = {name: json.loads(t) for name, t in texts.items()}
    for each in (*parsed["graph"]["nodes"], *parsed["network"]["nodes"]):
        each["layer"] = text
    for choice in parsed["plan0"]["choices"]:
        choice |= {"layer": text, "reason": text, "refused": [[text, text]]}
    parsed["model"]["points"][0]["notes"] = [text]
    path = tmp_path / "m.aero"

    def written() -> None:
        path.write_bytes(container.to_bytes({name: json.dumps(p) for name, p in parsed.items()}, arrays))

    written()
    fast = aerogel.load(path)
    shown = [*fast.notes, *(t for c in fast.plan.choices for t in (c.layer, c.reason, *sum(c.refused, ())))]
    assert fast.network is not None
    shown += [n.layer for n in fast.network.graph.nodes]
    assert len(shown) > 4
    assert all(line.isprintable() for line in shown)
    parsed["model"]["points"][0]["how"] = text
    written()
    with pytest.raises(aerogel.InvalidFile) as refused:
        aerogel.load(path)
    assert str(refused.value).isprintable()
