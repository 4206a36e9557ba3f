"""Blocks by feature. A block writes into a Sketch; most are lines from texts.py, those that need more are
functions here.

`FEATURES` holds for each feature its blocks: (first) they work on the raw input, (middle) anywhere, (last)
they make the result, (whole) they write everything. calls.py enters its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.sketch import Sketch
from tests.fuzz.texts import ACTIVATIONS, OTHER, SAME, TEXTS, WRITES


@dataclass(frozen=True)
class Block:
    """How a piece of network is written, and where it may stand."""

    write: Callable[[Sketch], None]
    place: str = "middle"
    text: str = ""


FEATURES: dict[str, list[Block]] = {
    feature: [Block(lambda s, text=text: s.do(text), "middle", text) for text in texts]  # type: ignore[misc]
    for feature, texts in TEXTS.items()
}


def block(
    feature: str, place: str = "middle", weight: int = 1
) -> Callable[[Callable[[Sketch], None]], Callable[[Sketch], None]]:
    """Enters a function under a feature; `weight` times, where it has many variants of its own."""

    def enter(write: Callable[[Sketch], None]) -> Callable[[Sketch], None]:
        FEATURES.setdefault(feature, []).extend([Block(write, place)] * weight)
        return write

    return enter


@block("aliases", weight=3)
def same_shape(s: Sketch) -> None:
    s.do(
        f"a = CONV(x)\nb = {s.turn(SAME)}\n{s.pick(*WRITES)}\nx = "
        f"{s.pick('a * b', 'a + b', 'a', 'CONV(a) + b')} #contiguous"
    )


@block("aliases", weight=2)
def other_shape(s: Sketch) -> None:
    s.do(
        f"a = CONV(x)\nb = {s.turn(OTHER)}\n{s.pick(*WRITES)}\nx = "
        f"{s.pick('a', 'CONV(a)', 'a + b.mean()')} #contiguous"
    )


@block("aliases")
def module_alias(s: Sketch) -> None:
    made = s.layer(
        s.turn(
            ["nn.Dropout(0.5)", "nn.Identity()", "nn.Dropout2d(0.2)", "nn.Flatten(2)", "nn.AlphaDropout(0.1)"]
        )
    )
    s.do(f"a = CONV(x)\nb = {made}(a)\n{s.pick(*WRITES)}\nx = a * 1.5 #contiguous")


@block("aliases")
def write_then_view(s: Sketch) -> None:
    """The view is taken first, the base written later."""
    s.do(f"b = CONV(x)\na = b\nv = {s.turn(OTHER)}\n{s.pick(*WRITES)}\nx = b + v.mean() #contiguous")


@block("activations", weight=2)
def activation(s: Sketch) -> None:
    name = s.turn(ACTIVATIONS).replace("CH", str(s.channels))
    if "shrink" in name or "Threshold" in name:
        s.flags.add("loose")
    s.do(f"x = {s.layer('nn.' + name)}({s.pick('CONV(x)', 'CONV(x)', 'BN(CONV(x))', 'x')})")


@block("activations")
def activation_and_its_input(s: Sketch) -> None:
    name = s.pick("SiLU()", "ReLU()", "PReLU()", "Hardswish()", "ReLU(inplace=True)", "ELU(inplace=True)")
    s.do(f"y = CONV(x)\nx = {s.layer('nn.' + name)}(y) + y")


@block("buffers", weight=4)
def buffers(s: Sketch) -> None:
    c = s.channels
    s.init.append("self.register_buffer('count', torch.zeros(()))")
    s.init.append(f"self.register_buffer('mean', torch.randn(1, {c}, 1, 1), persistent=False)")
    s.init += [
        f"self.plain = torch.randn({c}, 1, 1)",
        f"self.scale = nn.Parameter(torch.rand({c}, 1, 1))",
        "self.n, self.grid = 1, None",
    ]
    s.do(
        s.turn(
            [
                "self.count.add_(1)\nx = CONV(x) * self.count #state",
                "self.n += 1\nx = CONV(x) * self.n #state",
                "x = CONV(x - self.mean) * self.plain",
                "self.count += 1\nx = CONV(x) + self.count #state",
                "self.mean.mul_(0.9).add_(x.mean((0, 2, 3), keepdim=True) * 0.1)\nx = CONV(x) - "
                "self.mean #state",
                "x = CONV(x) * self.scale + self.mean",
                "if self.grid is None or self.grid.shape[-1] != x.shape[3]:\n"
                "    self.grid = torch.linspace(0, 1, x.shape[3], dtype=x.dtype)\nx = CONV(x) + "
                "self.grid #state",
                "self.mean[:, :1] = x.mean()\nx = CONV(x) + self.mean #state",
                "x = CONV(x) + self.count\nself.count.fill_(2.0) #state",
                "self.n = x.shape[2]\nx = CONV(x) * (self.n / 8) #state",
                "y = self.mean\nx = CONV(x) + y\ny.add_(1) #state",
                "if self.n == 1:\n    x = x * 2\nself.n = 2\nx = CONV(x) #state",
                "with torch.no_grad():\n    self.scale.mul_(0.5)\nx = CONV(x) * self.scale #state",
                "self.mean = x.mean((0, 2, 3), keepdim=True)\nx = CONV(x) - self.mean #state",
                "x = CONV(x) + self.mean.add(1)\nx = x * self.mean.clone().mul_(2)",
            ]
        )
    )


@block("dropout", weight=3)
def trained(s: Sketch) -> None:
    """A model or one of its layers left in training mode."""
    kind = s.turn(["Dropout2d(0.5)", "Dropout(0.5)", "batch norm", "whole"])
    if kind == "batch norm":
        s.do("x = BN(CONV(x)) #state #may_refuse")
    else:
        s.do(
            f"x = {s.layer('nn.' + (kind if 'D' in kind else 'Dropout(0.2)'))}(BN(CONV(x))) "
            "#random #may_refuse"
        )
    made = s.init[-1].split(" ")[0].replace("self.", "model.")
    s.after.append("model.train()" if kind == "whole" else f"{made}.train()")
    s.flags |= {"state"} if kind == "whole" else set()


@block("shared", weight=3)
def shared(s: Sketch) -> None:
    a, c = s.conv(), s.channels
    b, bn = s.conv(), s.layer(f"nn.BatchNorm2d({c})")
    choice = s.turn(
        [
            f"x = {a}(F.relu({a}(x)))",
            f"x = {b}(F.relu({a}(x)))\ntied",
            f"x = {bn}({a}({bn}(x)))",
            f"x = F.conv2d(x, {a}.weight * 0.5, {a}.bias, padding=1) + {a}(x)",
            f"x = F.conv2d({a}(x), {a}.weight.transpose(0, 1), padding=1)",
            f"w = {a}.weight\nw = (w - w.mean((1, 2, 3), True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)\n"
            "x = F.conv2d(x, w, padding=1)",
            f"x = torch.tanh({a}(x))\nx = {bn}({a}(x)) + {bn}(x)",
            f"x = {a}(x)[:, :, ::2] + {a}(x[:, :, ::2])",
            f"for m in ({a}, {b}, {a}):\n    x = torch.tanh(m(x))",
            f"x = F.conv2d(x, {a}.weight, stride=2, padding=1)",
            f"x = F.conv_transpose2d({a}(x), {a}.weight, padding=1)",
            f"x = {a}(x) + F.conv2d(x, {a}.weight.detach().clone().mul_(2), padding=1)",
            f"x = F.conv2d(x, {a}.weight[:, :, 1:2, 1:2]) * {b}.bias.view(1, -1, 1, 1)",
        ]
    )
    if "tied" in choice:
        s.init.append(f"{b}.weight = {a}.weight")
    s.do(choice.replace("\ntied", ""))


@block("convs", weight=6)
def convs(s: Sketch) -> None:
    c, k = s.channels, s.pick(4, 8, 12, 16, 24)
    even = c % 2 == 0
    made, out = s.turn(
        [
            (f"nn.Conv2d({c}, {c * 2 if c < 33 else c}, 3, padding=1, groups={c})", c * 2 if c < 33 else c),
            (f"nn.Conv2d({c}, {k}, 3, padding=2, dilation=2)", k),
            (f"nn.Conv2d({c}, {k}, 3, stride=2, padding=1)", k),
            (f"nn.ConvTranspose2d({c}, {k}, 2, 2)", k),
            (f"nn.ConvTranspose2d({c}, {k}, 3, 2, 1, 1, bias=False)", k),
            (f"nn.Conv2d({c}, {c}, (1, 5), padding=(0, 2), groups={2 if even else 1})", c),
            (f"nn.Conv2d({c}, {k}, 4, stride=(2, 1), padding=(2, 1))", k),
            (f"nn.Conv2d({c}, {k}, 3, padding='same', dilation=(1, 2))", k),
            (f"nn.Conv2d({c}, {k}, 3, padding='valid', bias=False)", k),
            (
                f"nn.Conv2d({c}, {k}, 3, padding=(1, 2), "
                f"padding_mode='{s.pick('reflect', 'replicate', 'circular')}')",
                k,
            ),
            (f"nn.Conv2d({c}, {k}, 1, stride=2)", k),
            (f"nn.Conv2d({c}, {k}, 2, stride=3)", k),
            (f"nn.ConvTranspose2d({c}, {c}, 3, 1, 2, groups={c}, dilation=2)", c),
            (f"nn.ConvTranspose2d({c}, {k}, (3, 2), (1, 2), (2, 0))", k),
            (f"nn.Conv2d({c}, {k}, 7, padding=3)", k),
            (f"nn.Conv2d({c}, {k}, 2, padding='same')", k),
            (f"nn.LazyConv2d({k}, 3, padding=1)", k),
            (f"nn.Conv2d({c}, 1, 1)", 1),
            (f"nn.Conv2d({c}, {k}, 5, 1, 0)", k),
        ]
    )
    layer = s.layer(made)
    if "stride=(2" in made or "stride=2" in made or "stride=3" in made or ", 5, 1, 0" in made:
        s.low = s.low // 2
    if "Transpose" in made:
        s.high = s.high * 2
    s.channels = out
    s.do(f"x = {s.pick('', 'F.relu', 'torch.tanh')}({layer}(x)){s.pick('', '', ' + 1', ' * 2')}")
    if "stride" not in made and s.chance(0.3):
        s.do("x = F.relu(x + CONV(x))")


@block("norms", weight=8)
def norms(s: Sketch) -> None:
    c = s.channels
    groups = s.pick(*[g for g in (1, 2, 3, 4, c) if c % g == 0])
    choice = s.turn(
        [
            f"nn.GroupNorm({groups}, {c})",
            f"nn.InstanceNorm2d({c}, affine=True)",
            f"nn.InstanceNorm2d({c}, track_running_stats=True)",
            f"nn.BatchNorm2d({c}, affine=False)",
            f"nn.BatchNorm2d({c}, track_running_stats=False)",
            f"nn.BatchNorm2d({c}, eps=0.5)",
            f"nn.LayerNorm({c})",
            f"nn.RMSNorm({c})",
            f"nn.GroupNorm({c}, {c}, affine=False)",
            "nn.LocalResponseNorm(3, 0.1)",
            f"nn.BatchNorm2d({c}, momentum=None)",
            f"nn.LayerNorm({c}, elementwise_affine=False)",
        ]
    )
    made = s.layer(choice)
    inside = s.pick("CONV(x)", "F.relu(CONV(x))", "x + 0.5", f"{s.layer('nn.PReLU()')}(CONV(x))")
    if "LayerNorm" in choice or "RMS" in choice:
        s.do(f"x = {made}(({inside}).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)")
    else:
        s.do(f"x = {made}({inside})")


@block("reparametrised", weight=3)
def reparametrised(s: Sketch) -> None:
    a = s.conv()
    made = s.turn(
        [
            f"nn.utils.parametrizations.weight_norm({a})",
            f"nn.utils.weight_norm({a})",
            f"nn.utils.parametrizations.spectral_norm({a})",
            f"nn.utils.spectral_norm({a})",
            f"prune.random_unstructured({a}, 'weight', 0.8)",
            f"nn.utils.weight_norm({a}, dim=None)",
            f"prune.l1_unstructured({a}, 'weight', 0.9)",
            f"prune.ln_structured({a}, 'weight', 0.5, 2, 0)",
            f"nn.utils.parametrize.register_parametrization({a}, 'weight', nn.ReLU())",
            f"prune.random_unstructured({a}, 'bias', 0.5)",
            f"{a}.register_forward_hook(lambda m, i, o: o * 2)",
            f"{a}.register_forward_pre_hook(lambda m, i: (i[0] + 1,))",
        ]
    )
    s.init.append(made)
    s.do(s.pick(f"x = F.relu({a}(x))", f"x = {a}(x) + x", f"x = BN({a}(x))", f"x = {a}({a}(x))"))
