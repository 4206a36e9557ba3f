"""A network as text while it is being written: constructor lines, forward lines, arguments, and what the
judge must know of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch

T = TypeVar("T")
FLAGS = ("loose", "state", "random", "contiguous", "may_refuse", "writes_input", "plain_eager")
"""loose: roundings or comparisons inside, so a few elements may differ. state: calls depend on those before.
random: draws numbers. contiguous: what aliases what depends on strides. may_refuse: a refusal is right.
writes_input: eager changes its argument. plain_eager: float64 would mean something else, so eager itself is
the truth."""
SMALLEST, LARGEST = 4, 64


@dataclass(frozen=True)
class Size:
    """Of one call; `other` asks scalars and flags for another value than the example's."""

    n: int
    h: int
    w: int
    other: bool = False


Make = Callable[[Size], Any]


@dataclass(frozen=True)
class Argument:
    """One argument of forward: how it stands in the signature, how it is passed, and how a value is made."""

    name: str
    make: Make
    how: str = "positional"  # or "keyword", "star"
    default: str = ""


@dataclass
class Sketch:
    """Blocks append to it. `x` is the running value: float, n c h w, with `channels` channels.

    In lines, CONV is a new 3x3 layer that keeps the channels, POINT a 1x1 one, BN a batch norm, CH the number
    of channels, [[...]] a layer made by that expression. `low` and `high` bound h and w over all calls.
    """

    rng: Random
    turns: int = 0
    channels: int = 3
    low: int = 8
    high: int = 32
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    result: str = "x"
    flags: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    dtype: str = "float32"

    def pick(self, *options: T) -> T:
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def turn(self, options: Sequence[T]) -> T:
        """The main block walks through its variants from seed to seed; others take any."""
        return options[self.turns % len(options)] if self.turns >= 0 else self.rng.choice(options)

    def layer(self, expression: str) -> str:
        name = f"l{sum(line.startswith('self.l') for line in self.init)}"
        self.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def conv(self, out: int | None = None, kernel: int = 3, extra: str = "") -> str:
        """A new layer that keeps height and width; the running channels change with it."""
        made = self.layer(
            f"nn.Conv2d({self.channels}, {out or self.channels}, {kernel}, padding={kernel // 2}{extra})"
        )
        self.channels = out or self.channels
        return made

    def do(self, text: str) -> None:
        """Lines of forward, with the words above filled in and markers such as `#loose` taken off."""
        for flag in FLAGS:
            if f"#{flag}" in text:
                self.flags.add(flag)
                text = text.replace(f"#{flag}", "")
        for word, shrink, grow in (("#halves", 2, 1), ("#doubles", 1, 2)):
            if word in text:
                text, self.low, self.high = text.replace(word, ""), self.low // shrink, self.high * grow
        text = re.sub(r"\bCH\b", str(self.channels), text)
        text = re.sub(r"\[\[(.*?)\]\]", lambda m: self.layer(m[1]), text)
        text = re.sub(r"\bCONV\b", lambda _: self.conv(), text)
        text = re.sub(r"\bPOINT\b", lambda _: self.conv(kernel=1), text)
        text = re.sub(r"\bBN\b", lambda _: self.layer(f"nn.BatchNorm2d({self.channels})"), text)
        self.body += [line.rstrip() for line in text.splitlines()]

    def argument(self, name: str, make: Make, how: str = "positional", default: str = "") -> str:
        self.arguments.append(Argument(name, make, how, default))
        return name

    def room(self, text: str) -> bool:
        """Whether a block that halves or doubles still fits."""
        return not (
            ("#halves" in text and self.low // 2 < SMALLEST)
            or ("#doubles" in text and self.high * 2 > LARGEST)
        )

    def source(self, name: str = "Net") -> str:
        """The class, readable and complete."""
        order = {"positional": 0, "star": 1, "keyword": 2}
        known = sorted(self.arguments, key=lambda a: (order[a.how], bool(a.default)))
        words = [
            ("*" if a.how == "star" else "") + a.name + (f"={a.default}" if a.default else "") for a in known
        ]
        first = next((i for i, a in enumerate(known) if a.how == "keyword"), None)
        if first is not None and not any(a.how == "star" for a in known):
            words.insert(first, "*")
        lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += [f"    def forward(self, {', '.join(words)}):", *(f"        {line}" for line in self.body)]
        return "\n".join([*lines, f"        return {self.result}", ""])

    def call(self, size: Size, layout: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of one size, made anew each time from torch's seed."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        order = {"positional": 0, "star": 1, "keyword": 2}
        for argument in sorted(self.arguments, key=lambda a: (order[a.how], bool(a.default))):
            value = argument.make(size)
            if argument.name == "image" and isinstance(value, torch.Tensor):
                value = laid_out(value.to(dtype) if value.is_floating_point() else value, layout)
            if argument.how == "keyword":
                kwargs[argument.name] = value
            elif argument.how == "star":
                args += value
            else:
                args.append(value)
        return tuple(args), kwargs


def image(channels: int) -> Make:
    return lambda size: torch.randn(size.n, channels, size.h, size.w)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other strides."""
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "expanded" and x.dim() == 4 and len(x):
        return x[:1].expand(x.shape)
    return x
