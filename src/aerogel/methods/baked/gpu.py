"""`baked` on GPUs: refused. There `stridepack` has a form with the weights in its code."""

from __future__ import annotations

from collections.abc import Iterator

from aerogel.errors import InvalidFile
from aerogel.ir import Array, Config, Conv, Gpu, Packed, Pool, Stats
from aerogel.methods.baked import NAME

WHY = "its code is written for CPUs with AVX-512; on GPUs stridepack has a form with the weights in the code"


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return WHY


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    return iter(())


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    raise InvalidFile(f"{NAME}: {WHY}")


def unpack(packed: Packed, conv: Conv) -> Array:
    raise InvalidFile(f"{NAME}: {WHY}")


def layout(config: Config) -> str:
    return "contiguous"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False


def build(packed: Packed, conv: Conv, config: Config, pool: Pool | None = None) -> list[object]:
    raise InvalidFile(f"{NAME}: {WHY}")
