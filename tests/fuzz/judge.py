"""One network, compiled and called beside eager: what was answered, refused, wrong."""

from __future__ import annotations

import copy
import re
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import aerogel
from aerogel.runtime.eager import channels_last
from tests.fuzz.onnx_files import Exported, NotExported
from tests.fuzz.spec import Call, Spec
from tests.fuzz.values import changed, copied, double, same, same_state, snapshot, zeroed

SLACK = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest output, beside twice eager's own error."""
LOOSE = 0.6
"""This share of the elements must fit where a rounding or a comparison may fall the other way in a few."""
LAYOUT = 0.01
"""So much of the largest output may depend on how maps lie in memory."""
EXTRAS = 10
"""One network in so many is also copied, saved, loaded and traced."""


@dataclass
class Result:
    """What became of one network. A failure is (kind, words)."""

    seed: int
    blocks: str
    source: str = ""
    may_refuse: bool = False
    how: str = ""
    calls: int = 0
    right: int = 0
    refused: list[str] = field(default_factory=list)
    allowed: int = 0
    raised: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, kind: str, words: str) -> None:
        self.failures.append((kind, words))

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """Eager's: the value, the same in float64 where that means the same, the arguments afterwards; or what it
    raised, and whether that was only for how the arguments lie in memory."""

    value: Any = None
    exact: Any = None
    left: Any = None
    raised: Exception | None = None
    strides: bool = False


def judge(spec: Spec) -> Result:
    """Compile, call at every size in turn, and look at everything that must not change."""
    result, start = (
        Result(spec.seed, spec.title, spec.source, "may_refuse" in spec.flags),
        time.perf_counter(),
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            _judge(spec, result, Path(folder))
    except NotExported as why:
        result.how, result.notes = "not exported", [str(why)[:200]]
    result.seconds = time.perf_counter() - start
    return result


def _judge(spec: Spec, result: Result, folder: Path) -> None:
    order = [*spec.calls, spec.calls[1], spec.calls[2], spec.calls[0]]
    answers = Exported(spec, folder).answers if spec.onnx else partial(eager_answers, spec)
    truth = answers(order)
    model: Any = str(folder / "net.onnx") if spec.onnx else spec.build()
    before, example = None if spec.onnx else snapshot(model), spec.example()
    torch.manual_seed(0)
    answering = sum(answer.raised is None for answer in truth[:4])
    if answers([spec.example])[0].raised is not None:
        result.how = "eager refuses the example"
        return
    try:
        fast = aerogel.compile(model, *example, tune=spec.tune, store=folder / "store", progress=False)
    except Exception as why:  # every kind is looked at
        result.calls = answering
        _refused(spec, result, why, "compile", answering)
        return
    result.how = str(fast.how)
    result.notes = [str(n) for n in getattr(fast, "notes", ())]
    if before is not None and (said := changed(before, snapshot(model))):
        result.fail("changed model", f"compile changed the user's model: {said}")
    if not same(example, spec.example()):
        result.fail("changed example", "compile changed the example's tensors")
    if (
        before is not None
        and "state" not in spec.flags
        and list(fast.state_dict()) == list(before["state"])
        and not same_state(fast.state_dict(), before["state"])
    ):
        result.fail("state_dict", "the compiled module's state_dict is not the model's")
    kept: list[tuple[Any, Any]] = []
    for i, (call, answer) in enumerate(zip(order[:4], truth, strict=False)):
        got = _called(spec, result, fast, call, answer, i, f"call {i}")
        kept.append((got, copied(got)))
    for i, (got, before_zeroing) in enumerate(kept):
        if not same(got, before_zeroing):
            result.fail("overwritten", f"the result of call {i} changed during later calls")
        for leaf in pytree.tree_leaves(got):
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                zeroed(leaf)
    _called(
        spec, result, fast, order[4], truth[4], 4, "call 1 again, after earlier outputs were zeroed", "zeroed"
    )
    if before is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.7).add_(0.1)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.add_(0.3)
        _called(
            spec,
            result,
            fast,
            order[5],
            truth[5],
            5,
            "call 2 again, after the original's weights changed",
            "follows",
        )
    if spec.seed % EXTRAS == 3:
        _extras(spec, result, fast, order[6], truth[6], folder)


def eager_answers(spec: Spec, order: list[Call]) -> list[Answer]:
    """One copy called in this order, and beside it one in float64."""
    model, answers = spec.build(), []
    exact = spec.build(double=True) if not spec.flags & {"random", "plain_eager"} else None
    for i, call in enumerate(order):
        args, kwargs = call()
        value64 = None
        try:
            torch.manual_seed(i)
            with torch.no_grad():
                value = copied(model(*args, **kwargs))
        except Exception as why:
            answers.append(Answer(raised=why, strides=_answers(model, call)))
            continue
        if exact is not None:
            try:
                with torch.no_grad():
                    args64, kwargs64 = pytree.tree_map_only(Tensor, double, call())
                    value64 = copied(exact(*args64, **kwargs64))
            except Exception:
                exact = None
        answers.append(Answer(value, value64, (args, kwargs)))
    return answers


def _answers(model: Any, call: Call) -> bool:
    """Whether eager answers the same call with its tensors in order."""
    try:
        with torch.no_grad():
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, call())
            model(*args, **kwargs)
    except Exception:
        return False
    return True


def _called(
    spec: Spec, result: Result, fast: Any, call: Call, answer: Answer, i: int, what: str, kind: str = "wrong"
) -> Any:
    """One call beside eager's answer. Only first calls are counted; those after something was changed have a
    kind of their own."""
    counted = kind == "wrong"
    args, kwargs = call()
    if answer.raised is None:
        result.calls += counted
    else:
        result.raised += counted
    torch.manual_seed(i)
    try:
        got = fast(*args, **kwargs)
    except Exception as why:
        if answer.raised is None:
            _refused(spec, result, why, what, int(counted))
        elif not (
            typed(why) or type(why) is type(answer.raised) or (spec.onnx and type(why) is RuntimeError)
        ):
            result.fail("untyped", f"{what}: eager raised {_short(answer.raised)}; aerogel {_short(why)}")
        return None
    if answer.raised is not None and (spec.onnx or answer.strides):
        return got  # onnxruntime refuses what an exporter wrote, eager a view of strided memory: no verdict
    if answer.raised is not None:
        result.fail(
            "accepts", f"{what} ({_sizes(args)}): eager raised {_short(answer.raised)}; aerogel answered"
        )
        return got
    said = differs(spec, got, answer)
    if said and "random" in spec.flags and _as_random(spec, fast, call):
        said = ""
    if said and kind != "follows" and not spec.onnx and _ill_conditioned(spec, call, got, answer):
        said = ""
    if said:
        result.fail(kind, f"{what} ({_sizes(args)}): {said}")
    elif counted:
        result.right += 1
    if answer.left is not None and not same((args, kwargs), answer.left):
        result.fail("input effect", f"{what}: the caller's tensors are not left as eager leaves them")
    return got


def _refused(spec: Spec, result: Result, why: Exception, what: str, calls: int) -> None:
    if not typed(why):
        result.fail("untyped", f"{what}: {_short(why)}")
    elif "may_refuse" in spec.flags:
        result.allowed += calls
    else:
        result.refused += [
            re.sub(r"\d+", "N", f"{type(why).__name__}: {str(why).splitlines()[0][:150]}")
        ] * calls


def typed(why: Exception) -> bool:
    return isinstance(why, aerogel.AerogelError)


def differs(spec: Spec, got: Any, answer: Answer) -> str:
    """Words on the first leaf that is not eager's; empty where all are."""
    flat, wanted = pytree.tree_flatten(got), pytree.tree_flatten(answer.value)
    if flat[1] != wanted[1]:
        return f"structure {flat[1]} where eager has {wanted[1]}"[:300]
    exact = pytree.tree_leaves(answer.exact) if answer.exact is not None else wanted[0]
    exact = exact if len(exact) == len(wanted[0]) else wanted[0]
    for i, (g, e, x) in enumerate(zip(flat[0], wanted[0], exact, strict=True)):
        if said := _leaf(g, e, x, "loose" in spec.flags, spec.precision):
            return f"output {i}: {said}"
    return ""


def _leaf(g: Any, e: Any, x: Any, loose: bool, precision: torch.dtype) -> str:
    if not isinstance(e, Tensor):
        if isinstance(e, float) and isinstance(g, float):
            return "" if abs(g - e) <= 1e-4 * (1 + abs(e)) or g != g == e != e else f"{g} where eager has {e}"
        return "" if type(g) is type(e) and g == e else f"{g!r} where eager has {e!r}"[:200]
    if not isinstance(g, Tensor) or g.shape != e.shape or g.dtype != e.dtype:
        found = f"{tuple(g.shape)} {g.dtype}" if isinstance(g, Tensor) else type(g).__name__
        return f"{found} where eager has {tuple(e.shape)} {e.dtype}"
    if not e.numel():
        return ""
    if not e.is_floating_point():
        off = int((g != e).sum())
        return f"{off} of {e.numel()} elements differ" if off > (e.numel() * 0.02 if loose else 0) else ""
    x = x if isinstance(x, Tensor) and x.shape == e.shape else e
    g64, e64, x64 = g.double(), e.double(), x.double()
    if not torch.equal(g64.isnan(), e64.isnan()) and not loose:
        return f"{int(g64.isnan().sum())} NaN where eager has {int(e64.isnan().sum())}"
    fine = e64.isfinite() & x64.isfinite() & g64.isfinite()
    odd = int((~fine & (g64 != e64) & ~(g64.isnan() & e64.isnan())).sum())
    if odd > (e.numel() * (1 - LOOSE) if loose else 0):
        return f"{odd} infinities or NaN where eager has others"
    if not fine.any():
        return ""
    error, eager = (g64 - x64)[fine].abs(), (e64 - x64)[fine].abs()
    slack = max(SLACK[e.dtype], SLACK[precision]) * (5 if x is e else 1)
    allowed = 2 * float(eager.max()) + slack * float(x64[fine].abs().max()) + 1e-30
    if loose:
        allowed = 4 * float(eager.median()) + slack * float(x64[fine].abs().max()) + 1e-30
        share = float((error <= allowed).double().mean())
        return (
            ""
            if share >= LOOSE
            else f"only {share:.0%} of elements within {allowed:.2g}, most off {float(error.max()):.3g}"
        )
    worst = float(error.max())
    return (
        ""
        if worst <= allowed
        else f"off by {worst:.3g} of {float(x64[fine].abs().max()):.3g}, eager by {float(eager.max()):.2g}"
    )


def _ill_conditioned(spec: Spec, call: Call, got: Any, answer: Answer) -> bool:
    """Whether eager itself moves as far when its weights are rounded otherwise, or its maps lie otherwise: a
    norm over what is almost constant blows up the last bit, and torch's norms in channels_last lose more. A
    layout excuses no more than LAYOUT: a model whose answer depends on it is answered as it lies."""
    moved = list[Any]()
    for seed in range(4):
        model, rng = spec.build(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.is_floating_point()):
                weight.mul_(1 + 2.0**-22 * torch.randn(weight.shape, generator=rng).to(weight.dtype))
            args, kwargs = call()
            if seed == 0:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                args, kwargs = pytree.tree_map_only(Tensor, channels_last, (args, kwargs))
            moved.append(pytree.tree_leaves(model(*args, **kwargs)))
    known = zip(pytree.tree_leaves(got), pytree.tree_leaves(answer.value), *moved, strict=True)
    for ours, eager, laid, *others in known:
        if isinstance(eager, Tensor) and eager.is_floating_point():
            reach = max(float((other - eager).abs().max()) for other in others)
            reach = max(reach, min(float((laid - eager).abs().max()), LAYOUT * float(eager.abs().max())))
            if not float((ours - eager).abs().max()) <= 4 * reach:
                return False
        elif not isinstance(eager, Tensor) and ours != eager:
            return False
    return True


def _as_random(spec: Spec, fast: Any, call: Call) -> bool:
    """Whether calls differ from one another and have the zeros and the size of eager's."""
    model, looks = spec.build(), []
    for run in (fast, model):
        torch.manual_seed(5)
        with torch.no_grad():
            leaves = [
                [v.double() for v in pytree.tree_leaves(run(*a, **k)) if isinstance(v, Tensor)]
                for a, k in (call() for _ in range(12))
            ]
        first = torch.stack([v[0] for v in leaves])
        looks.append(
            (
                float((first == 0).double().mean()),
                float(first.abs().mean()),
                bool((first.std(0) > 1e-12).any()),
            )
        )
    (zeros, size, moves), (zeros0, size0, moves0) = looks
    return moves == moves0 and abs(zeros - zeros0) < 0.1 and abs(size - size0) <= 0.15 * size0


def _extras(spec: Spec, result: Result, fast: Any, call: Call, answer: Answer, folder: Path) -> None:
    """A copy, a file there and back, and a trace, which must be refused."""
    if "state" not in spec.flags:
        try:
            _called(spec, result, copy.deepcopy(fast), call, answer, 6, "a deep copy", "copied")
        except Exception as why:
            result.fail("untyped", f"deepcopy(compiled): {_short(why)}")
        try:
            aerogel.save(fast, folder / "net.aero")
            _called(
                spec, result, aerogel.load(folder / "net.aero"), call, answer, 6, "saved and loaded", "saved"
            )
        except aerogel.AerogelError as why:
            result.notes.append(f"not saved: {why}")
        except Exception as why:
            result.fail("untyped", f"save: {_short(why)}")
    args, kwargs = call()
    if kwargs or answer.raised is not None or not all(isinstance(a, Tensor) for a in args):
        return
    try:
        torch.jit.trace(fast, args, check_trace=False)  # type: ignore[no-untyped-call]
        result.fail("trace", "torch.jit.trace bakes the answer in")
    except aerogel.AerogelError:
        pass
    except Exception as why:
        result.fail("trace", f"torch.jit.trace: {_short(why)}")


def _short(why: BaseException) -> str:
    words = str(why).strip().splitlines() or [""]
    return f"{type(why).__name__}: {words[0][:160]}"


def _sizes(args: tuple[Any, ...]) -> str:
    return ", ".join("x".join(map(str, a.shape)) if isinstance(a, Tensor) else repr(a)[:20] for a in args)
