"""Why no layer of a model is on a sparse kernel: the reason that most of its layers share, and only where it
is true, sparsity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aerogel.ir import Choice, Node, Ref
from aerogel.ir.tensors import DTYPE_NAMES
from aerogel.runtime.module import Compiled
from aerogel.tune.search import NOT_ASKED, RULE, TOO_FEW

SPARSITY = (
    "Nothing here is sparse enough for sparse kernels: where a dense runtime (onnxruntime, OpenVINO) "
    "serves it, keep that."
)
NO_LAYER = "There is no convolution or Linear to speed up."
LAYERS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose", "aten.linear")


def why_dense(fast: Compiled) -> str:
    """A sentence for a model of which torch or dense kernels run every layer."""
    found = Counter([*map(_of, fast.plan.choices), *_left(fast)])
    if not found:
        return _nothing(fast)
    ((reason, count),) = found.most_common(1)
    if reason == SPARSITY:
        return SPARSITY
    share = f"{count} of {found.total()}" if count < found.total() else "all"
    return f"No layer is on a sparse kernel: {reason} ({share} layers)."


def _of(choice: Choice) -> str:
    """Why this layer is dense."""
    refused = [refusal.why for refusal in choice.refused]
    asked = [why for why in refused if why != NOT_ASKED]
    timed = any(config.method != choice.config.method for config in choice.configs())
    if refused and not asked and not timed:
        return "only dense was asked for (methods= or strict_nan=True)"
    if TOO_FEW in refused or (choice.sparsity < RULE and (timed or not refused)):
        return SPARSITY
    if timed:
        return "dense kernels were faster at these sizes" + (
            " than the methods asked for" if NOT_ASKED in refused else ""
        )
    return Counter(asked).most_common(1)[0][0] if asked else "dense was chosen by rule"


def _left(fast: Compiled) -> Iterator[str]:
    """For each convolution and Linear that was never a choice, why torch runs it."""
    if fast.captured is None:
        return
    chosen = {choice.layer for choice in fast.plan.choices}
    for node in fast.captured.graph.nodes:
        if node.op.startswith(LAYERS) and (node.layer or node.name) not in chosen:
            yield _torchs(node, fast)


def _torchs(node: Node, fast: Compiled) -> str:
    assert fast.captured is not None
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    held = fast.captured.constants.get(weight.name) if isinstance(weight, Ref) else None
    if held is None:
        return "weights are computed while the model runs"
    if held.dtype not in DTYPE_NAMES:
        return f"weights are {held.dtype}, and kernels of ours take float32, float16 and bfloat16"
    operator = node.op.split(".")[1]
    if operator == "linear":
        return "a Linear over more than features (batch, features) is torch's"
    return f"{operator} has no sparse kernel"


def _nothing(fast: Compiled) -> str:
    """No layer was seen: the model has none, or they were not to be looked into."""
    if not fast.is_graph and any(
        ".quantized" in type(module).__module__ for module in fast.original.modules()
    ):
        return "The model is quantised, and kernels of ours take floats: compile the model as it was before."
    if fast.captured is None:
        return f"Nothing of it could be compiled: {fast.notes[0]}." if fast.notes else NO_LAYER
    if any(node.op == "onnx" for node in fast.captured.graph.nodes):
        return "What could be sped up runs in onnxruntime: its operators are none that aerogel calls."
    return NO_LAYER
