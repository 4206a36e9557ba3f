"""Where maps stand: one planar layout for each element type and image size, so that residuals and chains of
layers fit without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aerogel.backends.cpu.lower import pooling
from aerogel.ir import ALONE, NO_BORDER, Border, Config, Conv, Layout, Place, Stats, Target, widest
from aerogel.methods import BASELINE, cpu_form, demands, ranked

Size = tuple[str, tuple[int, int]]
"""An element type, height and width."""


def read(conv: Conv) -> Size:
    return conv.dtypes.input, conv.size


def written(conv: Conv) -> Size:
    return conv.dtypes.output, conv.out


def planes(
    convs: Mapping[str, Conv], configs: Mapping[str, Config], target: Target, others: Iterable[Size] = ()
) -> dict[Size, Layout]:
    """The layouts of what these convolutions read and write under these configurations, and of `others`.

    The border is the widest any reader needs. A method may want rows of its input and output equally far
    apart, which ties one size to another: pitches grow until every layer is content.
    """

    def wanted(name: str, place: Place) -> tuple[Layout, Layout]:
        return cpu_form(configs[name].method).layouts(convs[name], configs[name], target, place)

    border: dict[Size, Border] = dict.fromkeys(others, NO_BORDER)
    for name, conv in convs.items():
        reads, _ = wanted(name, ALONE)
        own = conv.pad if reads.kind == "planar" else NO_BORDER
        for size, needs in ((read(conv), own), (written(conv), NO_BORDER)):
            border[size] = widest(border.get(size, NO_BORDER), needs)
    slack = dict.fromkeys(border, pooling.SLACK)
    pitch = {size: size[1][1] + max(b[1], b[3]) for size, b in border.items()}
    before: dict[Size, int] = {}
    while before != pitch:
        before = dict(pitch)
        for name, conv in convs.items():
            place = Place(border[written(conv)], pitch[written(conv)], x_pitch=pitch[read(conv)])
            for size, layout in zip((read(conv), written(conv)), wanted(name, place), strict=True):
                if layout.kind == "planar":
                    pitch[size] = max(pitch[size], layout.pitch)
                    slack[size] = max(slack[size], layout.slack)
    return {size: Layout("planar", pitch[size], b, slack[size], size[0]) for size, b in border.items()}


def likely(convs: Mapping[str, Conv], stats: Mapping[str, Stats], target: Target) -> dict[str, Config]:
    """What each convolution may run on, before anything was timed: the first method by rank that takes it, in
    a configuration that asks nothing of the others."""
    found = {}
    for name, conv in convs.items():
        able = (cpu_form(m) for m in ranked() if cpu_form(m).refuse(conv, target, stats[name]) is None)
        offered = (config for form in able for config in form.configs(conv, target, stats[name]))
        modest = next((config for config in offered if not demands(config)), None)
        if modest is not None:
            found[name] = modest
    return found


def places(convs: Mapping[str, Conv], configs: Mapping[str, Config], target: Target) -> dict[str, Place]:
    """Where the maps around each convolution stand under these configurations; those of torch's are not
    there."""
    ours = {name: config for name, config in configs.items() if config.method != BASELINE}
    made = planes({name: convs[name] for name in ours}, ours, target)
    found = {}
    for name in ours:
        x, y = made[read(convs[name])], made[written(convs[name])]
        found[name] = Place(y.border, y.pitch, x.border, x.pitch)
    return found
