"""Blocks for what goes in and out: types, arguments, numbers of dimensions, structures of results, heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.blocks import FEATURES, Block, block
from tests.fuzz.sketch import Argument, Size, Sketch, image


@block("dtypes", "first", weight=8)
def round_trip(s: Sketch) -> None:
    """On the raw input, so that the rounding is the same in every precision."""
    s.do(
        s.turn(
            [
                "x = x.half().float()",
                "x = x.bfloat16().float()",
                "x = (x * 100).int().float() / 100",
                "x = (x * 4).to(torch.int8).to(torch.float32)",
                "x = x.to(torch.float16).to(torch.float32)",
                "x = x.round()",
                "x = x * (x > 0)",
                "x = torch.where(x > 0, x, -x.half().float())",
                "x = (x * 30000).half().float().clamp(-1e5, 1e5) / 1e5",
                "x = x.double().float()",
                "x = (x > 0).float()",
                "x = x.trunc() + x.sign()",
            ]
        )
    )


@block("dtypes", "first", weight=4)
def odd_inputs(s: Sketch) -> None:
    """An image of integers, or a second argument of an odd type added to a layer."""
    kind = s.turn(["uint8", "index", "bool", "int64", "float64", "float16", "mask"])
    c = s.channels
    if kind in ("uint8", "index"):
        dtype = torch.uint8 if kind == "uint8" else torch.int64
        shape = (lambda z: (z.n, c, z.h, z.w)) if kind == "uint8" else (lambda z: (z.n, z.h, z.w))
        s.arguments[0] = Argument("image", lambda z: torch.randint(0, 9, shape(z)).to(dtype))
        s.do(
            "x = x.float() / 9"
            if kind == "uint8"
            else f"x = {s.layer(f'nn.Embedding(9, {c})')}(x).permute(0, 3, 1, 2)"
        )
        return
    name = s.argument(
        "extra",
        lambda z: (torch.randn(z.n, 1, z.h, z.w) * 3).to(
            torch.bool if kind in ("bool", "mask") else getattr(torch, kind)
        ),
    )
    added = f"CONV(x).masked_fill({name}, 0.0)" if kind == "mask" else f"CONV(x) {s.pick('+', '*')} {name}"
    s.do(f"x = ({added}).float()")


@block("dtypes", "whole", weight=4)
def whole_type(s: Sketch) -> None:
    s.dtype = s.turn(["float64", "float16", "bfloat16"])
    s.argument("image", image(3))
    s.do(f"x = F.relu({s.conv(8)}(image))")
    s.do(
        s.turn(
            [
                "x = F.relu(CONV(x) + x)",
                "x = F.max_pool2d(x, 2)",
                "x = BN(x)",
                "x = CONV(x).float().to(image.dtype)",
                "x = F.silu(CONV(x))",
            ]
        )
    )
    s.do(
        s.turn(
            [
                "x = CONV(x).mean((2, 3))",
                "x = POINT(x)",
                "x = F.interpolate(x, scale_factor=2)",
                "x = CONV(x + 1)",
            ]
        )
    )


@block("unbatched", "whole")
def unbatched(s: Sketch) -> None:
    """No batch dimension, or one that squeeze() takes away."""
    kind = s.turn(["2d", "1d", "squeeze", "3d", "batched 1d", "batched 3d", "squeeze all", "unsqueeze"])
    if "squeeze" in kind:
        s.argument("image", image(3))
        s.do(f"x = F.relu({s.conv(8)}(image))")
        linear = s.layer("nn.Linear(8, 5)")
        pooled = "F.adaptive_avg_pool2d(x, 1)"
        ways = {
            "squeeze": f"{linear}({pooled}.squeeze())",
            "squeeze all": f"{linear}(x.mean((2, 3)).squeeze())",
        }
        s.do(f"x = {ways.get(kind, f'{linear}({pooled}.squeeze(-1).squeeze(-1)).unsqueeze(0)')}")
        return
    d, c = int(kind[-2]), s.pick(4, 6)
    batch = "batched" in kind
    s.argument(
        "image",
        lambda z: torch.randn(
            *([z.n] if batch else []), 3, *{1: (z.w,), 2: (z.h, z.w), 3: (4, z.h // 2, z.w // 2)}[d]
        ),
    )
    a, b = s.layer(f"nn.Conv{d}d(3, {c}, 3, padding=1)"), s.layer(f"nn.Conv{d}d({c}, {c}, 3, padding=1)")
    s.do(f"x = F.relu({a}(image))")
    up = s.layer(f"nn.ConvTranspose{d}d({c}, 2, 2, 2)")
    norm = s.layer(f"nn.BatchNorm{d}d({c})") if batch else ""
    s.do(
        s.pick(
            f"x = F.max_pool{d}d({b}(x), 2)",
            f"x = {up}({b}(x))",
            f"x = {norm}({b}(x)) + x",
            f"x = F.avg_pool{d}d(x, 2) * 2",
        )
    )


def varied(example: object, other: object) -> Callable[[Size], Any]:
    """A plain value that changes with the size asked for."""
    return lambda z: other if z.other else example


@block("arguments", weight=5)
def arguments(s: Sketch) -> None:
    """Scalars, None, dicts, lists, keywords and stars beside the image."""
    c = s.channels
    kind = s.turn(
        [
            "flag",
            "dict",
            "none",
            "int",
            "float",
            "star",
            "keyword",
            "list",
            "str",
            "tensor or none",
            "default",
            "nested",
            "two",
        ]
    )
    name = f"arg{len(s.arguments)}"

    def scale(_: Size) -> Tensor:
        return torch.rand(c, 1, 1)

    if kind in ("flag", "int", "float", "str", "none", "tensor or none"):
        make = {
            "flag": varied(True, False),
            "int": varied(2, 3),
            "float": varied(0.5, 1.25),
            "str": varied("relu", "tanh"),
            "none": lambda z: None,
        }
        s.argument(
            name,
            make.get(kind, lambda z: None if z.other else scale(z)),
            s.pick("positional", "keyword"),
            s.pick("", "None"),
        )
    text = {
        "flag": f"x = CONV(x) if {name} else x * 2",
        "int": f"x = CONV(x) * {name}",
        "float": f"x = CONV(x) + {name}",
        "none": f"x = CONV(x)\nif {name} is not None:\n    x = x + {name}",
        "str": f"x = getattr(torch, {name} or 'relu')(CONV(x))",
        "tensor or none": f"x = CONV(x)\nif {name} is not None:\n    x = x * {name}",
        "dict": f"x = CONV(x) * {name}['b'] + {name}['a']",
        "star": f"x = CONV(x)\nfor t in {name}:\n    x = x + t",
        "keyword": f"x = CONV(x) * {name}",
        "list": f"x = CONV(x) * {name}[0] + {name}[1]",
        "default": f"x = CONV(x) * {name}",
        "nested": f"x = CONV(x) * {name}['p'][0] + (0 if {name}['q'] is None else 1)",
        "two": f"x = CONV(x) * {name}",
    }[kind]
    if kind == "dict":
        s.argument(name, lambda z: {"a": scale(z), "b": scale(z)})
    elif kind == "list":
        s.argument(name, lambda z: [scale(z), scale(z)])
    elif kind == "nested":
        s.argument(name, lambda z: {"p": (scale(z), 3), "q": None}, "keyword")
    elif kind == "star" and not any(a.how == "star" or a.default for a in s.arguments):
        s.argument(name, lambda z: (scale(z), torch.randn(z.n, 1, 1, 1)), "star")
    elif kind in ("keyword", "default", "two", "star"):
        s.argument(
            name,
            lambda z: torch.randn(z.n, c, 1, 1),
            "positional" if kind == "two" else "keyword",
            "1.0" if kind == "default" else "",
        )
        text = f"x = CONV(x) * {name}"
    s.do(text)


@block("outputs", "last", weight=3)
def outputs(s: Sketch) -> None:
    """Views of the input, of each other, of a parameter; structures; numbers."""
    first = next((line.split(" ")[0] for line in s.init if "nn.Conv2d" in line), "self.l0")
    s.result = s.turn(
        [
            "x, x[:, :1]",
            "x, image",
            "image[:, :1], x",
            "{'x': x, 'n': {'y': x.mean((2, 3)), 'z': (x, None)}}",
            f"x, {first}.weight",
            "x, x",
            f"x, {first}.weight[:1], {first}.bias",
            "x.transpose(2, 3)",
            "x, x.shape[2]",
            "[x, (x + 1,)]",
            "x.expand(2, *x.shape)",
            "x.flatten(1), x",
            "x, x.shape[0] * 2, 'name', None, 1.5, True",
            "x, x.argmax(1)",
            "x.chunk(2, 1)",
            "x, x > 0",
            "x.topk(2, 1)",
            "x.max(1)",
            "x.unbind(1)",
            "x.mean(), x.sum((2, 3))",
            "x[:, :1].detach()",
            "(image + 1).view(-1), x",
            "x.half(), x.double()",
            "x.permute(0, 2, 3, 1)",
            "(x,)",
            "image",
            "x.squeeze()",
            "x, torch.ones(3)",
            "x[..., :0], x",
            "x.sum().item() * 0 + x.shape[0]",
            "image.view(image.shape), image",
        ]
    )
    s.flags |= {"loose"} if any(word in s.result for word in ("arg", "topk", "max", "> 0", "half")) else set()


COMMON_HEADS = 10
"""So many of these end other networks too."""
HEADS = [
    "x = [[nn.Linear(CH, 7)]](x.mean((2, 3)))",
    "x = [[nn.LazyLinear(5)]](F.adaptive_avg_pool2d(x, (3, 4)).flatten(1))",
    "x = [[nn.Linear(CH, 4)]](x.permute(0, 2, 3, 1))",
    "x = [[nn.LazyLinear(3)]](x.flatten(1))",
    "x = x.mean(1)",
    "x = [[nn.Flatten()]](x)",
    "x = torch.log_softmax([[nn.Linear(CH, 6)]](F.adaptive_max_pool2d(x, 1).view(x.shape[0], -1)), 1)",
    "x = F.pixel_shuffle(torch.cat([x] * 4, 1), 2)",
    "x = [[nn.Linear(CH, CH)]](F.adaptive_avg_pool2d(x, 1).reshape(-1, CH)).relu().softmax(-1)",
    "x = x.reshape(x.shape[0], CH, -1).max(-1)[0]",
    "x = F.unfold(x, 2)",
    "x = F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2)",
    "x = [[nn.Bilinear(CH, CH, 3)]](x.mean((2, 3)), x.amax((2, 3)))",
]
FEATURES["heads"] = [Block(lambda s, text=text: s.do(text), "last", text) for text in HEADS]  # type: ignore[misc]
