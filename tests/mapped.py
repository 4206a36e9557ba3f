"""Links code while the process's memory is large and full of holes, as Ray's workers are: python -m
tests.mapped SEED

Four GiB are taken, every free page above them too, and before each link one small hole is made far from the
rest: what a linker takes in two pieces comes to lie more than 2 GB apart. Prints "linked" and how many.
"""

from __future__ import annotations

import ctypes
import random
import sys
from itertools import pairwise
from pathlib import Path

from aerogel.codegen.cpu import llvm, rows
from aerogel.codegen.cpu.abi import Code
from aerogel.ir import Dtypes

SPAN, PAGE, TOP = 4 << 30, 4096, 0x7FFFFFFFF000
_TAKEN, _AT = 0x4022, 0x100000  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, MAP_FIXED_NOREPLACE
CODES = [
    rows.RowsCode("generic", Dtypes(), n, steps)
    for n in (1, 2, 3)
    for steps in ((), ("bias",), ("relu",), ("silu",))
]


def main() -> None:
    libc, rng = ctypes.CDLL(None), random.Random(int(sys.argv[1]))
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # what is loaded once is loaded
    llvm.function(str(CODES[0]), rows.ENTRY, lambda: rows.emit(CODES[0]), "generic")
    texts = {code: llvm.object_code(rows.emit(code), "generic") for code in CODES}
    low = libc.mmap(None, SPAN, 0, _TAKEN, -1, 0)
    kept: list[Code] = []
    for content in texts.values():
        spans = [
            tuple(int(v, 16) for v in line.split()[0].split("-"))
            for line in Path("/proc/self/maps").read_text().splitlines()
        ]
        for (start, end), (after, _) in pairwise(spans):
            if start >= low and end < after < TOP:
                libc.mmap(end, after - end, 0, _TAKEN | _AT, -1, 0)
        libc.munmap(low + rng.randrange(SPAN // PAGE - 64) * PAGE, rng.choice([1, 2, 3, 4, 8]) * PAGE)
        kept.append(llvm._link(content, rows.ENTRY))
    print("linked", len(kept), flush=True)


if __name__ == "__main__":
    main()
