"""compile(), save(), load() and calls of a compiled module, called wrongly: an AerogelError that names the
thing and the remedy.

Where eager torch answers, the compiled module answers alike; both ways to run a model (its graph, or torch)
refuse alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel import AerogelError, InvalidFile, ShapeError
from aerogel.ir import EAGER
from aerogel.runtime.module import Compiled

X = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One input called x."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def compiled(how: str) -> Compiled:
    fast = aerogel.compile(net(), X, tune="off")
    if how == "graph":
        return fast
    return Compiled(fast.original, None, fast.plan, EAGER, (), None, fast.captured)


@pytest.fixture(scope="module", params=["graph", "torch"])
def fast(request: pytest.FixtureRequest) -> Compiled:
    return compiled(request.param)


def refused(call: Callable[[], Any], says: str, kind: type[AerogelError] = AerogelError) -> str:
    """One sentence of ours that says this, in capitals or not."""
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert re.search(says, text, re.IGNORECASE), text
    assert "\n" not in text
    assert len(text) < 600, f"a sentence, not a page: {text}"
    return text


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda x: x, "torch.nn.Module.*function"),
        (net().state_dict(), "torch.nn.Module.*load_state_dict"),
        (123, "torch.nn.Module.*int"),
        (None, "torch.nn.Module.*None"),
        (Net, r"torch.nn.Module.*Net\(\)"),
        ([net()], "torch.nn.Module.*list"),
    ],
    ids=["lambda", "state_dict", "int", "None", "class", "list"],
)
def test_compile_takes_a_module(model: Any, says: str) -> None:
    refused(lambda: aerogel.compile(model, X, tune="off"), says)


@pytest.mark.parametrize("path", ["missing.onnx", Path("missing.onnx")])
def test_a_file_that_is_missing(path: Any) -> None:
    refused(lambda: aerogel.compile(path), "'missing.onnx' cannot be read: no such file", InvalidFile)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    torch.save(net().state_dict(), tmp_path / "state.pth")
    refused(lambda: aerogel.compile(tmp_path), "folder|directory", InvalidFile)
    refused(lambda: aerogel.compile(tmp_path / "notes.txt"), "no ONNX file", InvalidFile)
    refused(lambda: aerogel.compile(tmp_path / "state.pth"), "no ONNX file", InvalidFile)
    aerogel.save(compiled("graph"), tmp_path / "m.aero")
    refused(lambda: aerogel.compile(tmp_path / "m.aero"), r"load\(", InvalidFile)


def test_save_takes_what_compile_gave(tmp_path: Path) -> None:
    out = tmp_path / "m.aero"
    for wrong in (net(), net().state_dict(), 3):
        refused(lambda wrong=wrong: aerogel.save(wrong, out), r"compile\(")  # type: ignore[misc]
    assert not out.exists()
    refused(lambda: aerogel.save(compiled("graph"), tmp_path), "folder|directory")
    refused(lambda: aerogel.save(compiled("graph"), 3), "path")  # type: ignore[arg-type]


def test_load_takes_a_file(tmp_path: Path) -> None:
    refused(lambda: aerogel.load(tmp_path), "folder|directory", InvalidFile)
    refused(lambda: aerogel.load(tmp_path / "none.aero"), "cannot be read", InvalidFile)
    refused(lambda: aerogel.load(3), "path")  # type: ignore[arg-type]
    refused(lambda: aerogel.load(net()), "path")  # type: ignore[arg-type]
    (tmp_path / "text.aero").write_text("no model")
    refused(lambda: aerogel.load(tmp_path / "text.aero"), "not a model saved by aerogel", InvalidFile)


@pytest.mark.parametrize("shapes", [(1, 3, 96, 96), {"x": (1, 3, 96, 96)}, [{"x": (1, 3, 96, 96)}]])
def test_shapes_are_for_files(shapes: Any) -> None:
    refused(lambda: aerogel.compile(net(), X, shapes=shapes, tune="off"), "shapes.*ONNX")


@pytest.fixture
def open_file(tmp_path: Path) -> Path:
    onnx, helper = pytest.importorskip("onnx"), pytest.importorskip("onnx.helper")
    weight = onnx.numpy_helper.from_array(np.ones((8, 3, 3, 3), np.float32), "w")
    given = helper.make_tensor_value_info("images", 1, ["n", 3, "h", "w"])
    node = helper.make_node("Conv", ["images", "w"], ["y"])
    graph = helper.make_graph([node], "g", [given], [helper.make_tensor_value_info("y", 1, None)], [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(tmp_path / "open.onnx")
    )
    return tmp_path / "open.onnx"


def test_sizes_of_a_file(open_file: Path) -> None:
    def sized(shapes: Any) -> Callable[[], Any]:
        return lambda: aerogel.compile(open_file, shapes=shapes, tune="off")

    example = r"shapes=\{\"images\": \(1, 3, 640, 640\)\}"
    refused(sized(None), r"input 'images' has open sizes \(n, h, w\).*" + example, ShapeError)
    refused(sized((1, 3, 96, 96)), r"shapes=\{")
    refused(sized(["images"]), r"shapes=\{")
    refused(sized({"image": (1, 3, 96, 96)}), "no input 'image'; it has images")
    refused(sized({"images": (1, 3, 96)}), "'images' takes", ShapeError)
    refused(sized({"images": 96}), "'images'", ShapeError)
    refused(sized({"images": (1, 3, 96.5, 96)}), "'images'", ShapeError)
    refused(sized({"images": (1, 3, -96, 96)}), "'images'", ShapeError)
    refused(sized([]), "at least one")
    refused(lambda: aerogel.compile(open_file, X.numpy(), tune="off"), "numpy|ndarray")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (X.numpy(), "(numpy|ndarray).*torch.from_numpy"),
        ((X.numpy(),), "(numpy|ndarray).*torch.from_numpy"),
        ((), "example"),
        ((X, X), "positional|arguments"),
        ({"x": X}, "kwargs"),
        (3, "tuple"),
        ("x", "tuple"),
        (torch.zeros(1, 4, 16, 16), "4"),
        (X.double(), "float64|double"),
    ],
    ids=["numpy", "numpy in a tuple", "none", "two", "dict", "int", "str", "channels", "float64"],
)
def test_examples(args: Any, says: str) -> None:
    refused(lambda: aerogel.compile(net(), args, tune="off"), says)


def test_an_example_by_keyword() -> None:
    fast = aerogel.compile(net(), kwargs={"x": X}, tune="off")
    assert torch.allclose(fast(x=X), net()(X), atol=1e-5)
    refused(lambda: aerogel.compile(net(), kwargs={"input": X}, tune="off"), "'input'")
    refused(lambda: aerogel.compile(net(), kwargs=X, tune="off"), "kwargs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": "fastest"}, "tune is 'off', 'fast', 'full' or seconds, not 'fastest'"),
        ({"tune": -1}, "tune is .* not -1"),
        ({"tune": math.nan}, "tune is .* not nan"),
        ({"tune": math.inf}, "tune is .* not inf"),
        ({"tune": 0}, "tune is .* not 0"),
        ({"tune": True}, "tune is .* not True"),
        ({"tune": None}, "tune is .* not None"),
        ({"tune": ["off"]}, "tune is "),
        ({"methods": "direct"}, r"methods.*\[?\(?['\"]direct"),
        ({"methods": ("nope",)}, "methods are dense.*'nope' is none of them"),
        ({"methods": (3,)}, "methods are dense.*3"),
        ({"methods": 3}, "methods"),
        ({"methods": ()}, "methods"),
        ({"dtype": torch.int16}, "dtype must be .*torch.bfloat16.*int16"),
        ({"dtype": "float8"}, "dtype must be .*bfloat16.*float8"),
        ({"dtype": 16}, "dtype must be .*bfloat16.*16"),
        ({"calibration": X}, r"calibration.*\[x"),
        ({"calibration": 3}, r"calibration.*\[x"),
        ({"calibration": [X.numpy()]}, "(numpy|ndarray).*torch.from_numpy"),
        ({"calibration": [torch.zeros(1, 3, 16)]}, "calibration|dimensions"),
        ({"plan": "plan"}, "plan"),
        ({"store": 3}, "store"),
        ({"dynamic_shapes": 3}, "dynamic_shapes"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_options(options: dict[str, Any], says: str) -> None:
    refused(lambda: aerogel.compile(net(), X, **{"tune": "off", **options}), says)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_precision_by_its_name(name: str) -> None:
    """Either it is taken, or the sentence says what is."""
    said, fast = f"torch.{name}", None
    try:
        fast = aerogel.compile(net(), X, dtype=name, tune="off")
    except AerogelError as why:
        said = str(why)
    assert f"torch.{name}" in said
    assert fast is None or torch.allclose(fast(X), net()(X), atol=0.05)


def test_what_eager_answers(fast: Compiled) -> None:
    wanted = fast.original(X)
    assert torch.allclose(fast(X), wanted, atol=1e-5)
    assert torch.allclose(fast(x=X), wanted, atol=1e-5)
    assert torch.allclose(fast(X.to(memory_format=torch.channels_last)), wanted, atol=1e-5)
    assert torch.allclose(fast(nn.Parameter(X, requires_grad=False)), wanted, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(fast(X.clone().requires_grad_()), wanted, atol=1e-5)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda f: f(), "'x'"),
    "two": (lambda f: f(X, X), r"\b(1|one)\b|'x'"),
    "a list": (lambda f: f([X]), "list.*tensor|tensor.*list|'x'"),
    "a tuple": (lambda f: f((X,)), "tuple.*tensor|tensor.*tuple|'x'"),
    "another name": (lambda f: f(input=X), "'input'.*'?x|'x'.*input"),
    "both ways": (lambda f: f(X, x=X), "'x'"),
    "numpy": (lambda f: f(X.numpy()), "(numpy|ndarray).*torch.from_numpy|torch.from_numpy.*(numpy|ndarray)"),
    "None": (lambda f: f(None), "'x'.*None"),
    "a number": (lambda f: f(3.0), "'x'.*3"),
    "float64": (lambda f: f(X.double()), r"'x' is torch.float64.*float32"),
    "integers": (lambda f: f(X.to(torch.int32)), r"'x' is torch.int32.*float32"),
    "meta": (lambda f: f(X.to("meta")), "'x' is .*meta.*CPU"),
    "a gradient": (
        lambda f: f(X.clone().requires_grad_()),
        "requires grad. Fine-tune the original, then compile again",
    ),
    "three dimensions": (lambda f: f(X[0]), "'x' has 3 dimensions.* 4"),
    "channels": (lambda f: f(torch.zeros(1, 4, 16, 16)), "'x' has 4 in dimension 1.* 3 "),
    "a sparse tensor": (lambda f: f(X.to_sparse()), "'x'.*sparse"),
    "training": (lambda f: f.train(), "Fine-tune the original"),
    "half": (lambda f: f.half(), "Move or convert the original"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, fast: Compiled) -> None:
    call, says = CALLS[name]
    refused(lambda: call(fast), says)


def test_run_by_name(fast: Compiled) -> None:
    refused(lambda: fast.run(None, {"input": X.numpy()}), "'x'|'input'", ShapeError)
    refused(lambda: fast.run(["other"], {"x": X.numpy()}), "'other'", ShapeError)
    refused(lambda: fast.run(None, X.numpy()), "x")  # type: ignore[arg-type]
    refused(lambda: fast.run(None, {"x": "text"}), "'x'")
    refused(lambda: fast.run(None, {"x": X.numpy().astype(np.float64)}), "'x' is torch.float64")
    assert np.allclose(fast.run(None, {"x": X.numpy()})[0], fast.original(X).detach().numpy(), atol=1e-5)


def state(**changed: Any) -> dict[str, Any]:
    return {**{name: value.clone() for name, value in net().state_dict().items()}, **changed}


STATES: dict[str, tuple[Any, str]] = {
    "missing": ({k: v for k, v in state().items() if k != "conv.weight"}, "conv.weight"),
    "unexpected": (state(other=torch.zeros(1)), "'?other'?"),
    "another shape": (state(**{"conv.weight": torch.ones(8, 3, 5, 5)}), r"conv\.weight.*5"),
    "a bias of another shape": (state(**{"conv.bias": torch.ones(9)}), r"conv\.bias.*9"),
    "other zeros": (
        state(**{"conv.weight": torch.zeros(8, 3, 3, 3)}),
        "'conv.weight' has other zeros.*compile again",
    ),
    "other zeros in a Linear": (
        state(**{"head.weight": torch.zeros(4, 8)}),
        "'head.weight' has other zeros.*compile again",
    ),
    "numpy": (state(**{"conv.bias": np.ones(8, np.float32)}), "conv.bias.*(numpy|ndarray)|tensor.*conv.bias"),
    "no dict": ([1], "state"),
    "a module": (net(), "state_dict"),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    fast = compiled("graph")
    before = fast(X)
    refused(lambda: fast.load_state_dict(STATES[name][0]), STATES[name][1])
    assert torch.equal(fast(X), before), "a state that is refused changes nothing"
    assert torch.equal(fast.original(X), net()(X)), "nor the original"


def test_a_state_of_float64_is_cast_as_torch_does() -> None:
    fast = compiled("graph")
    doubled = {
        name: value.double() * 2 if value.is_floating_point() else value for name, value in state().items()
    }
    fast.load_state_dict(doubled)
    model = net()
    model.load_state_dict(doubled)
    assert torch.allclose(fast(X), model(X), atol=1e-4)
    assert {v.dtype for n, v in fast.state_dict().items() if n.endswith("weight")} == {torch.float32}


def test_a_state_that_is_not_strict() -> None:
    fast = compiled("graph")
    answer = fast.load_state_dict({**state(), "other": torch.zeros(1)}, strict=False)
    assert answer.unexpected_keys == ["other"]
    assert torch.allclose(fast(X), net()(X), atol=1e-5)


def test_speedup_is_none_where_nothing_was_timed(tmp_path: Path) -> None:
    fast = compiled("graph")
    assert fast.speedup is None
    aerogel.save(fast, tmp_path / "m.aero")
    assert aerogel.load(tmp_path / "m.aero").speedup is None


def test_explain_takes_what_compile_gave() -> None:
    refused(lambda: aerogel.explain(net()), r"compile\(\)")  # type: ignore[arg-type]


def test_models_that_are_not_ready() -> None:
    refused(lambda: aerogel.compile(net().train(), X, tune="off"), r"training mode.*eval\(\)")
