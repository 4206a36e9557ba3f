"""A model of our own: a copy that the user's later changes do not reach, and that is never run without being
put back.

What a model answers may depend on more than its arguments: buffers and attributes that forward() writes,
training mode, random numbers. compile() finds that out here, by running the copy.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aerogel.capture.copies import tensors_of
from aerogel.errors import AerogelError, InvalidArgument, UnsupportedModel
from aerogel.runtime.eager import Call, alike, answer, runner
from aerogel.runtime.graphmodel import HasGraph

_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def private(model: Any, call: Call) -> nn.Module:
    """A copy of the model in eval mode, with weights that hooks compute and lazy ones as they are for this
    call.

    Raises AerogelError where it is no module, or where its answers depend on training mode and it is in that.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"compile() takes a torch.nn.Module or the path of an ONNX file, not {_described(model)}"
        )
    own = copied(model.as_graph() if isinstance(model, HasGraph) else model)
    if any(is_lazy(t) for t in (*own.parameters(), *own.buffers())):
        _complete(own, call)
    _bake(own)
    if any(m.training for m in own.modules()):
        _same_in_training(own, call)
        own.eval()
    return own


def copied(model: nn.Module) -> nn.Module:
    """deepcopy, where tensors that are no leaves (weights that a hook computed) become what they are now."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in tensors_of(module):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        found: nn.Module = copy.deepcopy(model, memo)
    except Exception as why:  # whatever an attribute of the user's raises
        raise UnsupportedModel(
            f"the model cannot be copied ({type(why).__name__}: {str(why)[:200]}), and aerogel "
            "never runs the user's own. "
            "Remove what cannot be copied (locks, generators, open files) from its attributes."
        ) from why
    return found


def _complete(model: nn.Module, call: Call) -> None:
    """One run gives lazy modules their sizes."""
    try:
        runner(model, call)()
    except Exception as why:
        raise AerogelError(
            f"the model has lazy layers and does not run on the example: {str(why)[:200]}"
        ) from why


def _bake(model: nn.Module) -> None:
    """Weights that torch's old weight_norm and spectral_norm compute before each call become plain ones."""
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, WeightNorm | SpectralNorm):
                with torch.no_grad():
                    hook.remove(module)
                del module._forward_pre_hooks[number]


def _same_in_training(model: nn.Module, call: Call) -> None:
    """Raises AerogelError where training mode changes the answer or what the model holds."""
    modes = {module: module.training for module in model.modules()}
    try:
        with restored(model) as changed, torch.random.fork_rng(devices=[]):
            inside = answer(model, call)
            wrote = changed()
        with restored(model), torch.random.fork_rng(devices=[]):
            same = not wrote and alike(answer(model.eval(), call), inside, 0.0)
    except Exception:  # batch norm refuses some batches while it trains
        same = False
    for module, mode in modes.items():
        module.training = mode
    if not same:
        raise UnsupportedModel(
            "the model is in training mode, which changes its answers: call model.eval() first, then compile"
        )


_writes_weights: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that were seen to write to their parameters in forward()."""


@contextmanager
def restored(model: nn.Module, weights: bool = False) -> Iterator[Any]:
    """Run a model, then put its buffers and plain attributes back, and its parameters where it is known to
    write to them or `weights` asks to find out. Gives a function that says whether it has changed any."""
    modules = [
        m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule) and "network" not in vars(m)
    ]
    attributes = [{k: _kept(v) for k, v in vars(m).items() if k not in _PARTS} for m in modules]
    buffers = [dict(m._buffers) for m in modules]
    tensors = [b for held in buffers for b in held.values() if b is not None]
    parameters = list(model.parameters()) if weights or model in _writes_weights else []
    values = [(t, t.detach().clone()) for t in (*tensors, *parameters)]

    def changed() -> bool:
        moved = any(_differs(vars(m), before) for m, before in zip(modules, attributes, strict=True))
        swapped = any(
            dict(m._buffers).keys() != held.keys() for m, held in zip(modules, buffers, strict=True)
        )
        other = any(
            m._buffers[k] is not b for m, held in zip(modules, buffers, strict=True) for k, b in held.items()
        )
        return moved or swapped or other or any(_moved(now, before) for now, before in values)

    try:
        yield changed
    finally:
        with torch.no_grad():
            for module, before, held in zip(modules, attributes, buffers, strict=True):
                for name in [k for k in vars(module) if k not in before and k not in _PARTS]:
                    del vars(module)[name]
                vars(module).update({k: _kept(v) for k, v in before.items()})
                module._buffers.clear()
                module._buffers.update(held)
            for tensor, earlier in values:
                if _moved(tensor, earlier):
                    tensor.copy_(earlier)
                    if isinstance(tensor, nn.Parameter):
                        _writes_weights.add(model)


def writes_weights(model: nn.Module) -> bool:
    """Whether the model was seen to write to its parameters."""
    return model in _writes_weights


def lasting(model: nn.Module, call: Call) -> str | None:
    """Why the model's answer is no function of its arguments, or None: it is run twice, and must leave
    nothing behind that changes every time. What is filled once (a grid for this size) may stay."""
    with restored(model, weights=True), torch.random.fork_rng(devices=[]):
        first = answer(model, call)
        with restored(model, weights=True) as changed:
            second = answer(model, call)
            wrote = changed()
    if wrote:
        return "forward() changes an attribute or a buffer of the model at every call"
    return None if alike(first, second) else "the model answers the same call differently the second time"


def _kept(value: Any) -> Any:
    """What to compare with later: containers are copied, since forward() may write into them."""
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value


def _differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if {k for k in now if k not in _PARTS} != before.keys():
        return True
    return any(not _alike(now[k], v) for k, v in before.items())


def _alike(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, torch.Tensor) or isinstance(before, torch.Tensor):
        return isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor) and not _moved(now, before)
    try:
        return type(now) is type(before) and bool(now == before)
    except Exception:  # arrays and the like
        return False


def _moved(now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if now is None or before is None:
        return now is not before
    if now.shape != before.shape or now.dtype != before.dtype:
        return True
    now, before = now.detach(), before.detach()
    return not torch.equal(now, before) and not bool(
        ((now == before) | ((now != now) & (before != before))).all()
    )


def _described(model: Any) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}: make one first, compile({model.__name__}(), ...)"
    if isinstance(model, dict):
        return "a dict of weights: build the module, load_state_dict() them, and compile that"
    if callable(model):
        return "a function: put it into forward() of a module"
    return f"a {type(model).__name__}"
