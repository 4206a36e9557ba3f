"""The nouns of a decision: `Timing`, `Tried`, `Refusal`, `Choice`, `Plan`. Values with JSON, so that a plan
can be replayed without timing anything."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aerogel.errors import InvalidArgument, InvalidFile, printable
from aerogel.ir.config import Config
from aerogel.ir.conv import Conv
from aerogel.ir.stats import Idle
from aerogel.ir.target import Machine, machine

SCATTER_RATIO = 1.5
"""Paired ratios whose ends are this far apart are told as an interval: one number would promise too much."""


@dataclass(frozen=True)
class Timing:
    """Quantiles of repeated measurements, in microseconds, and of the ratio to the baseline of the same
    round.

    A ratio above 1 means faster than the baseline. The rounds are interleaved, so a slow minute slows both.
    """

    min_us: float
    p25_us: float
    p50_us: float
    rounds: int
    ratio_p25: float = 1.0
    ratio_p50: float = 1.0
    ratio_range: tuple[float, float] | None = None
    """Between these lie eight of ten ratios; of whole models, and not in records of earlier versions."""
    disturbed: bool = False
    """Whether other work held up too many of the rounds."""

    @property
    def doubt(self) -> str:
        """Return why one ratio would promise too much, or an empty string."""
        if self.disturbed:
            return "measured on a busy machine"
        low, high = self.ratio_range or (1.0, 1.0)
        return "its rounds differ widely" if high > SCATTER_RATIO * low else ""

    def ranged(self, times_us: Sequence[float], baseline_us: Sequence[float], disturbed: bool) -> Timing:
        """Return this timing with the range of the ratios of these rounds."""
        low, high = np.quantile(np.asarray(baseline_us) / np.asarray(times_us), [0.1, 0.9])
        return replace(self, ratio_range=(float(low), float(high)), disturbed=disturbed)

    @staticmethod
    def of(times_us: Sequence[float], baseline_us: Sequence[float]) -> Timing:
        """From the rounds of one candidate and of the baseline beside it."""
        times, base = np.asarray(times_us), np.asarray(baseline_us)
        if len(times) == 0 or len(times) != len(base) or not (times > 0).all():
            raise InvalidArgument("a timing needs at least one round, and a baseline for each")
        low, middle = np.quantile(base / times, [0.25, 0.5])
        quartile, median = np.quantile(times, [0.25, 0.5])
        return Timing(
            float(times.min()), float(quartile), float(median), len(times), float(low), float(middle)
        )


class Tried(NamedTuple):
    """A configuration that was timed."""

    config: Config
    timing: Timing


class Refusal(NamedTuple):
    """A method that was not timed, and the sentence that says why."""

    method: str
    why: str


@dataclass(frozen=True)
class Choice:
    """One layer's decision: what was chosen and why, every candidate that was timed, every method that
    refused and why.

    `layer` is the module's path, for people; `node` the graph's name of its value; ratios are to the layer's
    fastest dense. `in_network` is the layer's time in its place in the running network; its ratio is to the
    configuration that won alone.
    """

    layer: str
    node: str
    conv: Conv
    config: Config
    _: KW_ONLY
    sparsity: float = 0.0
    reason: str = ""
    tried: tuple[Tried, ...] = ()
    """The fastest first."""
    refused: tuple[Refusal, ...] = ()
    in_network: Timing | None = None
    idle: Idle | None = None
    """Zeros of its input on the calibration inputs."""
    limit: float | None = None
    """Of a layer that skips what is zero in its input: the share of active windows from which the next best
    is faster."""
    pooled: bool = False
    """Whether its kernel also does the pooling after it."""
    lost: float | None = None
    """In int8: of its output on the first calibration input, root mean square."""
    work: float | None = None
    """Multiplications of its kernel, as a share of the dense layer's; None where nobody counted them."""

    def fastest(self) -> dict[str, Tried]:
        """The fastest configuration of each method that was timed, by the method's name."""
        return {tried.config.method: tried for tried in reversed(self.tried)}

    def chosen_us(self) -> float | None:
        """Median microseconds of what was chosen; None where it was not timed alone."""
        return next((t.timing.p50_us for t in self.tried if t.config == self.config), None)

    def configs(self) -> tuple[Config, ...]:
        """What was timed, the fastest first."""
        return tuple(t.config for t in self.tried)

    def next_best(self) -> Config:
        """The fastest configuration of another method."""
        return next(c for c in self.configs() if c.method != self.config.method)


@dataclass(frozen=True)
class Beside:
    """Median microseconds of another runtime and of ours, in the same rounds."""

    theirs_us: float
    ours_us: float
    disturbed: bool = False
    """Whether other work held up too many of the rounds."""


@dataclass(frozen=True)
class Plan:
    """All choices for one target, with the whole model's timing. With `image_by_image` a batch runs so, and
    choices are for one image. `onnxruntime` and `openvino` are the times of those runtimes for a file, where
    they were taken; `differed` says where answers were not torch's, so that torch runs the model.

    Example:
        >>> plan = aerogel.compile(model, (x,), tune="off").plan
        >>> again = aerogel.compile(model, (x,), plan=plan)    # the same choices, nothing timed
    """

    target: Machine
    choices: tuple[Choice, ...]
    model: Timing | None = None
    image_by_image: bool = False
    onnxruntime: Beside | None = None
    differed: str = ""
    openvino: Beside | None = None

    def peers(self) -> dict[str, Beside]:
        """Return the times of other runtimes for the same file, by the runtime's name."""
        timed = {"onnxruntime": self.onnxruntime, "OpenVINO": self.openvino}
        return {name: beside for name, beside in timed.items() if beside is not None}

    def to_json(self) -> str:
        def timing(t: Timing | None) -> Any:
            """Without what only whole models have, so that thousands of candidates stay short."""
            return (
                None if t is None else {n: v for n, v in vars(t).items() if v is not None and v is not False}
            )

        return json.dumps(
            {
                "format": "aerogel-plan-3",
                "target": str(self.target),
                "model": timing(self.model),
                "apart": self.image_by_image,
                "onnxruntime": self.onnxruntime and vars(self.onnxruntime),
                "openvino": self.openvino and vars(self.openvino),
                "differed": self.differed,
                "choices": [
                    {
                        "layer": c.layer,
                        "node": c.node,
                        "sparsity": c.sparsity,
                        "reason": c.reason,
                        "conv": str(c.conv),
                        "config": str(c.config),
                        "tried": [[str(config), timing(t)] for config, t in c.tried],
                        "refused": [list(r) for r in c.refused],
                        "in_network": timing(c.in_network),
                        "idle": c.idle and [c.idle.elements, c.idle.vectors, c.idle.tiles],
                        "most": c.limit,
                        "pooled": c.pooled,
                        "lost": c.lost,
                        "work": c.work,
                    }
                    for c in self.choices
                ],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`. Any damage is an InvalidFile."""
        try:
            raw = json.loads(text)
            if raw["format"] != "aerogel-plan-3":
                raise InvalidFile(f"plan format '{str(raw['format'])[:80]}' is not aerogel-plan-3")
            choices = tuple(
                Choice(
                    printable(c["layer"]),
                    str(c["node"]),
                    Conv.parse(c["conv"]),
                    Config.parse(c["config"]),
                    sparsity=_share(c["sparsity"]),
                    reason=printable(c["reason"]),
                    tried=tuple(Tried(Config.parse(config), _timing(t)) for config, t in c["tried"]),
                    refused=tuple(Refusal(printable(name), printable(why)) for name, why in c["refused"]),
                    in_network=None if c["in_network"] is None else _timing(c["in_network"]),
                    idle=None if c["idle"] is None else _idle(*c["idle"]),
                    limit=None
                    if c["most"] is None
                    else _limit(c["most"], [str(config) for config, _ in c["tried"]], str(c["config"])),
                    pooled=_flag(c["pooled"]),
                    lost=None if c.get("lost") is None else _share(c["lost"]),
                    work=None if c.get("work") is None else _number(c["work"]),
                )
                for c in raw["choices"]
            )
            model = None if raw["model"] is None else _timing(raw["model"])
            return Plan(
                machine(raw["target"]),
                choices,
                model,
                _flag(raw["apart"]),
                _beside(raw.get("onnxruntime")),
                printable(raw.get("differed", "")),
                _beside(raw.get("openvino")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as why:
            raise InvalidFile(f"not a plan: {type(why).__name__} {str(why)[:200]}") from None


def _flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise InvalidFile(f"a flag is true or false, not {str(raw)[:80]}")
    return raw


def _us(raw: Any) -> float:
    if not 0 < float(raw) < math.inf:
        raise InvalidFile(f"no time: {str(raw)[:80]}")
    return float(raw)


def _beside(raw: Any) -> Beside | None:
    if raw is None:
        return None
    return Beside(_us(raw["theirs_us"]), _us(raw["ours_us"]), _flag(raw.get("disturbed", False)))


def _number(raw: Any) -> float:
    if not 0 <= float(raw) < math.inf:
        raise InvalidFile(f"not a number from 0 on: {str(raw)[:80]}")
    return float(raw)


def _share(raw: Any) -> float:
    if not 0 <= float(raw) <= 1:
        raise InvalidFile(f"a limit or a sparsity is a share from 0 to 1, not {str(raw)[:80]}")
    return float(raw)


def _limit(most: Any, tried: Sequence[str], config: str) -> float:
    """A share, and only where another method was timed that calls can go back to."""
    if all(other.partition("/")[0] == config.partition("/")[0] for other in tried):
        raise InvalidFile(f"a limit of {str(most)[:20]} for '{config[:80]}', and nothing else was timed")
    return _share(most)


def _idle(elements: Any, vectors: Any, tiles: Any) -> Idle:
    found = [int(v) for v in (elements, vectors, tiles)]
    if not all(0 <= v <= 100 for v in found):
        raise InvalidFile(f"zeros of an input are percents, not {found}")
    return Idle(*found)


def _timing(raw: dict[str, Any]) -> Timing:
    names = ("min_us", "p25_us", "p50_us", "ratio_p25", "ratio_p50")
    found = {n: float(raw[n]) for n in names}
    if not (0 < int(raw["rounds"]) < 2**31 and all(0 <= v < math.inf for v in found.values())):
        raise InvalidFile(f"no timing: {str(raw)[:200]}")
    ends = raw.get("ratio_range")
    if ends is not None:
        low, high = map(_number, ends)
        ends = min(low, high), max(low, high)
    return Timing(
        rounds=int(raw["rounds"]), ratio_range=ends, disturbed=_flag(raw.get("disturbed", False)), **found
    )
