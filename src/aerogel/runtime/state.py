"""New values for a compiled module, under the masks and the plan it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aerogel.capture.captured import SAME_NAME
from aerogel.capture.fuse import fuse
from aerogel.capture.network import Network
from aerogel.errors import AerogelError, InvalidArgument
from aerogel.ir import GRAPH

if TYPE_CHECKING:
    from aerogel.runtime.module import Compiled


def new_values(fast: Compiled, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Folded again; what was packed of the old ones is forgotten. Gives what load_state_dict gives."""
    if not isinstance(state_dict, Mapping):
        raise InvalidArgument(
            f"a state is what state_dict() of the model gives, not a {type(state_dict).__name__}"
        )
    if fast.network is None or fast.how != GRAPH:
        raise AerogelError("this module runs the original model. Load the weights there, then compile again.")
    if fast.network.meanings:
        raise AerogelError(
            "this module computes in int8, and new weights need new scales. Load the weights into the model, "
            "then compile again with calibration."
        )
    old, own = fast.network.captured, fast.original.state_dict()
    for name, value in state_dict.items():
        held = own.get(name)
        if held is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != held.shape:
            raise InvalidArgument(
                f"'{name}' is {_shaped(value)}; the model's is {_shaped(held)}. Load the "
                "weights of this model."
            )
        if held.dim() > 1 and not torch.equal(held != 0, value != 0):
            raise InvalidArgument(
                f"'{name}' has other zeros than the compiled model. Load it into the original, "
                "then compile again."
            )
    cast = {name: value.to(own[name].dtype) if name in own else value for name, value in state_dict.items()}
    try:
        answer = fast.original.load_state_dict(cast, strict)
    except RuntimeError as why:
        raise AerogelError(f"{' '.join(str(why).split())[:400]}") from None
    now = fast.original.state_dict()
    state = {name: name.removesuffix(SAME_NAME) for name in old.constants}
    constants = {
        n: now[state[n]].detach().clone() if state[n] in now else value for n, value in old.constants.items()
    }
    captured = replace(old, constants=constants)
    graph, fused, _ = fuse(captured.graph, constants, captured.shapes, captured.types)
    half, fast.network = fast.network.half, Network(captured, graph, fused)
    fast.network = fast.network if half is None else fast.network.halved(half)
    fast.captured = captured
    return answer


def _shaped(value: Any) -> str:
    return (
        "x".join(map(str, value.shape)) or "one number"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )
