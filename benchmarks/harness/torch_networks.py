"""The networks that every supported torch must capture, compile and answer as torch does.

Each entry of NETWORKS takes a scratch folder and returns the largest difference between the two answers, as a
share of torch's largest number. It raises where aerogel leaves the work to torch or the difference is too
large. Choices go by rule (`tune="off"`): nothing is timed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import aerogel
from aerogel.capture.export import CAN_OPEN_ONES
from aerogel.ir.dtypes import F32
from aerogel.zoo import models

FLOAT_LIMIT = 1e-4  # of float32
BFLOAT16_LIMIT = 5e-2
INT8_LIMIT = 0.15  # random weights and one calibration image: wrong scales are far beyond it
SPARSITY = 0.9


class SmokeFailure(Exception):
    """A network that this torch and aerogel together do not run as they should."""


def small_model() -> nn.Module:
    """Build two convolutions with batch norm, pooling and a classifier, seeded and pruned."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return models.prune(model.eval(), SPARSITY)


def small_input(batch: int = 1, height: int = 32, width: int = 32) -> torch.Tensor:
    """Return seeded images."""
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def largest_difference(expected: Any, actual: Any, limit: float) -> float:
    """Compare two answers, tensor by tensor, and raise where they differ by more than `limit`."""
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    actual_leaves, actual_structure = pytree.tree_flatten(actual)
    if expected_structure != actual_structure:
        raise SmokeFailure(f"the answer is {actual_structure}, torch's is {expected_structure}")
    error = 0.0
    for a, b in zip(expected_leaves, actual_leaves, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise SmokeFailure(f"an output is {b.dtype} {tuple(b.shape)}, torch's {a.dtype} {tuple(a.shape)}")
        scale = float(a.abs().max()) or 1.0
        error = max(error, float((a - b).abs().max()) / scale)
    if not error <= limit:
        raise SmokeFailure(f"answers differ by {error:.1e} of the largest number, more than {limit:.0e}")
    return error


def answer(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call a model without gradients."""
    with torch.no_grad():
        return model(*args, **(kwargs or {}))


def compiled_graph(model: Any, args: tuple[Any, ...], **options: Any) -> aerogel.Compiled:
    """Compile by rule, and raise unless the whole model became one graph of aerogel's."""
    fast = aerogel.compile(model, args, tune="off", progress=False, **options)
    if str(fast.how) != "graph":
        raise SmokeFailure(f"compiled as '{fast.how}': {'; '.join(fast.notes)}")
    return fast


def check_other_sizes(
    model: Any, fast: aerogel.Compiled, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_open: bool = True
) -> float:
    """Call a compiled module with other sizes than those of its example, and compare.

    Args:
        model: The original.
        fast: The compiled module.
        args: Arguments of the call.
        kwargs: Its keyword arguments.
        is_open: Raise unless the graph itself takes the call. Otherwise the first call may make a further
            program, and the second runs it.
    """
    assert fast.captured is not None
    reason = fast.misfit(fast.captured.flat(args, dict(kwargs)))
    if is_open and reason is not None:
        raise SmokeFailure(f"the graph is fixed to the sizes of the example: {reason}")
    expected = answer(model, args, kwargs)
    return max(largest_difference(expected, fast(*args, **kwargs), FLOAT_LIMIT) for _ in range(2))


def check_zoo(name: str, size: int, other_size: int) -> float:
    """Compile a pruned network of the zoo, and call it at two sizes and batches."""
    model = models.prune(models.make(name), SPARSITY)
    args, kwargs = models.example(name, size=size)
    fast = compiled_graph(model, args, kwargs=kwargs)
    errors = [largest_difference(answer(model, args, kwargs), fast(*args, **kwargs), FLOAT_LIMIT)]
    args, kwargs = models.example(name, size=other_size)
    errors.append(check_other_sizes(model, fast, args, kwargs))
    args, kwargs = models.example(name, batch=2, size=size)
    errors.append(check_other_sizes(model, fast, args, kwargs, is_open=CAN_OPEN_ONES))
    return max(errors)


def check_precision(dtype: Any, limit: float, **options: Any) -> float:
    """Compile the small model in fewer bits."""
    model, image = small_model(), small_input()
    fast = compiled_graph(model, (image,), dtype=dtype, **options)
    if all(choice.conv.dtypes == F32 for choice in fast.plan.choices):
        raise SmokeFailure("every layer stayed in float32")
    return largest_difference(answer(model, (image,)), fast(image), limit)


def check_saved_file(folder: Path) -> float:
    """Save the small model, load it, and call the copy."""
    model = small_model()
    aerogel.save(compiled_graph(model, (small_input(),)), folder / "small.aero")
    fast = aerogel.load(folder / "small.aero")
    error = check_other_sizes(model, fast, (small_input(1, 48, 40),), {})
    if not CAN_OPEN_ONES:  # a file answers the batch that it was captured for
        return error
    return max(error, check_other_sizes(model, fast, (small_input(2),), {}))


def check_onnx_file(folder: Path) -> float:
    """Write the small model as an ONNX file, and compile that."""
    import onnx
    from onnx import helper, numpy_helper

    model, image = small_model(), small_input()
    state = {name: value.numpy() for name, value in model.state_dict().items() if value.dim()}
    norm = [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    nodes = [
        helper.make_node("Conv", ["images", "0.weight", "0.bias"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", *norm], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["d", "4.weight", "4.bias"], ["e"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["e"], ["f"]),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "8.weight", "8.bias"], ["scores"], transB=1),
    ]
    sizes: dict[str, list[Any]] = {"images": ["n", 3, "h", "w"], "scores": ["n", 10]}
    images, scores = (helper.make_tensor_value_info(name, 1, size) for name, size in sizes.items())
    arrays = [numpy_helper.from_array(array, name) for name, array in state.items()]
    graph = helper.make_graph(nodes, "small", [images], [scores], arrays)
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(file, str(folder / "small.onnx"))
    fast = compiled_graph(str(folder / "small.onnx"), (), shapes={"images": tuple(image.shape)})
    return largest_difference(answer(model, (image,)), fast(image), FLOAT_LIMIT)


class _Messages(logging.Handler):
    """Keep what aerogel logs: with the dynamo backend, each graph that is left to torch."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def check_dynamo_backend(folder: Path) -> float:
    """Run `torch.compile(model, backend="aerogel")`, which finds aerogel by its entry point."""
    model, image = small_model(), small_input()
    logger, handler = logging.getLogger("aerogel"), _Messages()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        fast = torch.compile(model, backend="aerogel", options={"tune": "off", "progress": False})
        error = largest_difference(answer(model, (image,)), answer(fast, (image,)), FLOAT_LIMIT)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if handler.messages:
        raise SmokeFailure("; ".join(handler.messages))
    return error


def check_export_of_compiled(folder: Path) -> float:
    """Read a compiled module with torch.export and with torch.compile: one operator each time."""
    model, image = small_model(), small_input()
    fast, expected = compiled_graph(model, (image,)), answer(model, (image,))
    program = torch.export.export(fast, (image,))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if "aerogel.run.default" not in called:
        raise SmokeFailure(f"torch.export saw {sorted(called)} and not aerogel.run")
    exported = largest_difference(expected, answer(program.module(), (image,)), FLOAT_LIMIT)
    traced = torch.compile(fast, backend="eager", fullgraph=True)
    return max(exported, largest_difference(expected, answer(traced, (image,)), FLOAT_LIMIT))


def check_parts(folder: Path) -> float:
    """Compile a detector whose number of boxes depends on the data: its convolutional parts are aerogel's."""
    model = models.prune(models.make("detector"), SPARSITY)
    args, kwargs = models.example("detector", size=128)
    fast = aerogel.compile(model, args, kwargs, tune="off", progress=False)
    if str(fast.how) != "parts" or not fast.plan.choices:
        raise SmokeFailure(f"compiled as '{fast.how}': {'; '.join(fast.notes)}")
    return largest_difference(answer(model, args, kwargs), fast(*args, **kwargs), FLOAT_LIMIT)


NETWORKS: dict[str, Callable[[Path], float]] = {
    "resnet50": lambda folder: check_zoo("resnet50", 64, 96),
    "yolov8s": lambda folder: check_zoo("yolov8s", 64, 96),
    "unet": lambda folder: check_zoo("unet", 64, 96),
    "mobilenetv1": lambda folder: check_zoo("mobilenetv1", 64, 96),
    "densenet121": lambda folder: check_zoo("densenet121", 64, 96),
    "dict output": lambda folder: check_zoo("mapping", 32, 48),
    "1-d signal": lambda folder: check_zoo("signal", 256, 512),
    "bfloat16": lambda folder: check_precision(torch.bfloat16, BFLOAT16_LIMIT),
    "int8": lambda folder: check_precision("int8", INT8_LIMIT, calibration=[small_input()]),
    "saved file": check_saved_file,
    "ONNX file": check_onnx_file,
    "dynamo backend": check_dynamo_backend,
    "export of a Compiled": check_export_of_compiled,
    "compiled in parts": check_parts,
}
"""Name of each network or entry point, and its check."""


def run_check(name: str, folder: Path) -> dict[str, Any]:
    """Run one check and return its row: whether it passed, the difference, or why it failed."""
    try:
        with warnings.catch_warnings():
            # calls that fall back to torch warn
            warnings.filterwarnings("error", message="torch runs ")
            return {"network": name, "passed": True, "error": float(f"{NETWORKS[name](folder):.2g}")}
    except Exception as failure:  # torch raises dozens of types
        reason = (str(failure).strip().splitlines() or [""])[0][:300]
        return {"network": name, "passed": False, "reason": f"{type(failure).__name__}: {reason}"}
