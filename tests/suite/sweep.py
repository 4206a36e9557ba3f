"""Many cases through one method on every ISA it runs on, the reference computed once for each case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from aerogel.ir import DOTS, Target, here_levels, host
from aerogel.methods import METHODS, cpu_form, method
from tests.suite.cases import case
from tests.suite.run import Expected, describe, faults, worth_it


@dataclass
class Sweep:
    """What happened: cases run, refusals in words, failures with the command that repeats each."""

    ran: int = 0
    refused: int = 0
    few: int = 0
    by_isa: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


FAMILIES = {
    ("stridepack", False): 40,
    ("stridepack", True): 24,
    ("direct", True): 12,
    ("tilewise", True): 12,
    ("blockgemm", True): 12,
    ("actsparse", True): 12,
}
"""Where code depends on the problem's shape, or on many element types (True), so many shapes are met in a
run, each many times."""
FEW_FAMILIES = 10
"""In CI, whose time is LLVM's: of every method. A night has others."""
LIBRARY = ("dense",)
"""Methods that call a library: host ISA only, and no guard pages around what they allocate."""


BYTES = ("quads", "depthwise")
"""Methods that compute in int8, and in nothing else."""
ONE_ISA = {"baked": "avx512"}
"""Methods whose code is written for one ISA, in f32. Of them a refusal of few filters is counted as such."""
ON_GPUS = tuple(name for name in METHODS if "cpu" in method(name).NOT_ON)
"""Methods that have no form for CPUs."""
FEW_FILTERS = "filters share a window"


def native() -> tuple[str, ...]:
    """Methods whose kernels are ours."""
    return tuple(name for name in METHODS if name not in (*LIBRARY, *ON_GPUS))


def target_of(level: str) -> Target:
    """This machine held to a level: an ISA, without its product of bytes unless that is named too, as in
    avx2+avx512vnni."""
    isa, *dots = level.split("+")
    here = host().lower(isa)
    own = {extra for extra in here.extras if extra not in DOTS}.union(dots)
    return replace(here, extras=tuple(sorted(own)))


def levels(name: str) -> list[str]:
    """Levels of this machine that a method's cases run on; for bytes with and without each product of
    them."""
    if name in BYTES:
        pairs = (("avx512", "avx512vnni"), ("avx2", "avx512vnni"), ("avx2", "avxvnni"))
        dots = [f"{isa}+{dot}" for isa, dot in pairs if target_of(f"{isa}+{dot}").runs_here()]
        return [*dots, *here_levels()]
    if name in ONE_ISA:
        return [level for level in here_levels() if level == ONE_ISA[name]]
    return list(here_levels()[:1] if name in LIBRARY else here_levels())


def sweep(
    name: str,
    kind: str,
    seeds: Iterable[int],
    threads: tuple[int, ...] = (1,),
    isa: str | None = None,
    stop: int = 5,
    few: bool = False,
) -> Sweep:
    """Run the seeds; gives up after `stop` failures. `few` takes FEW_FAMILIES."""
    done, module = Sweep(), cpu_form(name)
    for seed in seeds:
        families = FAMILIES.get((name, "half" in kind or kind == "special"), 0)
        one = case(kind, seed, FEW_FAMILIES if few else families)
        expected = Expected(one)
        for level in levels(name) if isa is None else (isa,):
            most = max(1 + seed % 3, *threads) if len(threads) > 1 else 1 + seed % 3
            target = replace(target_of(level), threads=most)
            if (why := module.refuse(one.conv, target, worth_it(one.weight))) is not None:
                few_filters = name in ONE_ISA and FEW_FILTERS in why
                done.few, done.refused = done.few + few_filters, done.refused + (not few_filters)
                continue
            done.ran += 1
            done.by_isa[level] = done.by_isa.get(level, 0) + 1
            wrong = faults(module, target, one, expected, threads)
            if wrong:
                done.failures.append(f"{describe(name, level, one, few)}\n    {wrong}")
                if len(done.failures) >= stop:
                    return done
    return done
