"""What the running network decides: which configurations it is asked about, which one it chooses for a layer,
for an image size, and with the pooling after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from aerogel.ir import F32, Choice, Config, Timing
from aerogel.methods import BASELINE, demands, method, rounding
from aerogel.tune.search import NEAR, keep

NEARLY = 0.99
"""In the running network another configuration takes a layer where it needs less than this share of its
time."""


def refined(choice: Choice, configs: Sequence[Config], alike: Sequence[Sequence[Sequence[float]]]) -> Choice:
    """The choice moved to what is fastest in the running network. `alike` are microseconds there, index
    [layer][configuration][round], of this layer first and of those like it, which decide together; the
    chosen configuration is the first.

    The fastest round of each decides: what other work adds to a time is never less than nothing, and in a
    network there is always some. On a busy machine this orders configurations as a longer run does (rank
    correlation 0.9), medians do not (0.5): benchmarks/experiments/in_network.py.
    """
    if not alike[0][0]:
        return choice
    low = [sum(min(layer[i]) for layer in alike) for i in range(len(configs))]
    best = int(np.argmin(low))
    if low[best] > NEARLY * low[0]:
        best = 0
    timing = Timing.of(alike[0][best], alike[0][0])
    if best == 0:
        return replace(choice, in_network=timing)
    reason = "faster in the running network than the configuration that was faster alone"
    return replace(choice, config=configs[best], reason=reason, in_network=timing)


def poolable(choice: Choice) -> list[Config]:
    """Configurations that may do the pooling too: the chosen one, and the fastest of each other method. In
    bands of a few rows another may be faster than the one that is over whole maps."""
    mine = choice.config
    if _fixed(mine.method):
        return [mine]
    others = (t.config for name, t in choice.fastest().items() if name != mine.method and not _fixed(name))
    return [mine, *(config for config in others if demands(config) == demands(mine))]


def joined(
    choice: Choice, pool: str, configs: Sequence[Config], times: Sequence[Mapping[str, Sequence[float]]]
) -> Choice:
    """`times` are microseconds of all nodes with convolution and pooling apart [0] and in one kernel, by each
    of `configs` [1:], which goes by the pool's name; by its own, where the program did not join them. The
    fastest round decides among those, as it does for layers alone (`refined`)."""
    able = {
        config: under[pool]
        for config, under in zip(configs, times[1:], strict=False)
        if pool in under and not under.get(choice.node)
    }
    if not able or pool not in times[0]:
        return choice
    best = min(able, key=lambda config: min(able[config]))
    if configs[0] in able and min(able[best]) > NEARLY * min(able[configs[0]]):
        best = configs[0]
    apart = [a + b for a, b in zip(times[0].get(choice.node, []), times[0][pool], strict=True)]
    timing = Timing.of(able[best], apart)
    if not keep(timing):
        return choice
    reason = choice.reason if best == configs[0] else "faster than others with the pooling after it"
    return replace(choice, config=best, reason=reason, pooled=True, in_network=timing)


APART = 0.9
"""Octaves by which contenders differ, all options together: twice the channels, or half the vectors."""


def contenders(choice: Choice, modelled: Iterable[Config], most: int) -> list[Config]:
    """The chosen configuration and others for the running network to choose from: the best of other methods
    that were near it alone, then its own method's, in the order of their times and of the cost model. None
    is near another, since two that are alike lose alike; in half precision each rounds as one whose loss was
    looked at."""
    found, seen = [choice.config], {rounding(config) for config in choice.configs()}
    if _fixed(choice.config.method):
        return found
    us, best = choice.chosen_us(), choice.fastest()
    near = (t.config for t in best.values() if us is not None and t.timing.p50_us < NEAR * us)
    others = (config for config in near if not _fixed(config.method))
    for config in chain(others, _ours(choice), modelled):
        if len(found) == most:
            break
        known = choice.conv.dtypes == F32 or rounding(config) in seen
        if (
            known
            and demands(config) == demands(choice.config)
            and all(_octaves(config, other) >= APART for other in found)
        ):
            found.append(config)
    return found


def _fixed(name: str) -> bool:
    """Whether a layer on this method stays there, whatever the network says: torch's, for the copies around
    it, and those whose time depends on what is fed."""
    return name == BASELINE or method(name).SKIPS_INPUT


def _octaves(a: Config, b: Config) -> float:
    """How far apart: an octave is twice the value of one option."""
    if a.method != b.method:
        return math.inf
    names = {name for name, _ in (*a.options, *b.options)}
    return sum(abs(math.log2((1 + a.get(name, 0)) / (1 + b.get(name, 0)))) for name in names)


def by_demand(choice: Choice) -> tuple[Choice, Choice, Choice]:
    """The choice as it is; moved to its fastest configuration that asks nothing of the other layers of its
    image size; and to its fastest that does."""
    modest = next((c for c in _ours(choice) if not demands(c)), choice.config)
    demanding = next((c for c in _ours(choice) if demands(c)), choice.config)
    return choice, _moved(choice, modest), _moved(choice, demanding)


def _moved(choice: Choice, config: Config) -> Choice:
    if config == choice.config:
        return choice
    reason = (
        "rows of whole vectors make this layer slower, and the others of its image size faster by more"
        if demands(config)
        else "rows of whole vectors make this layer faster, and the others of its image size slower by more"
    )
    return replace(choice, config=config, reason=reason)


def _ours(choice: Choice) -> tuple[Config, ...]:
    """What was tried of the chosen method, the fastest first; nothing where torch runs the layer."""
    if choice.config.method == BASELINE:
        return ()
    return tuple(c for c in choice.configs() if c.method == choice.config.method)


def pitched(
    plans: Sequence[Sequence[Choice]], times: Sequence[Mapping[str, Sequence[float]]]
) -> list[Choice]:
    """For each image size the choices of that plan under which all its layers together are fastest in the
    network; the fastest round of each counts. The first plan is kept where no other needs less."""
    spent: dict[tuple[int, int], list[float]] = {}
    for choices in zip(*plans, strict=True):
        sums = spent.setdefault(choices[0].conv.out, [0.0] * len(plans))
        for i, under in enumerate(times):
            sums[i] += min(under.get(choices[0].node, [0.0]))
    best = {size: int(np.argmin(sums)) for size, sums in spent.items()}
    return [choices[best[choices[0].conv.out]] for choices in zip(*plans, strict=True)]
