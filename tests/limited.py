"""Model files loaded and called in a child that may take so much memory and time."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

MORE_BYTES, CPU_SECONDS, WALL_SECONDS = 2 << 30, 20, 120


def apart(
    work: Callable[[], Any], more_bytes: int = MORE_BYTES, cpu_seconds: int = CPU_SECONDS
) -> dict[str, Any]:
    """What `work` gives in a forked child under limits: {"kind": ...}, with the child's end where it did not
    come that far."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _limit(more_bytes, cpu_seconds)
            try:
                found = work()
            except BaseException as why:
                found = {"kind": type(why).__name__, "says": str(why)[:300]}
            said.write(json.dumps(found))
            said.flush()
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        said.seek(0)
        text = said.read()
    ended = os.waitstatus_to_exitcode(status)
    found = (
        json.loads(text)
        if text and ended == 0
        else {"kind": f"ended with {signal.Signals(-ended).name if ended < 0 else ended}"}
    )
    return {**found, "cpu_seconds": used.ru_utime + used.ru_stime}


def _limit(more_bytes: int, cpu_seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + cpu_seconds
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + more_bytes,) * 2)
    signal.alarm(WALL_SECONDS)


def _starved(why: BaseException | None) -> bool:
    """Whether it was the limit that refused, and not a look at what was asked for."""
    while why is not None:
        if (
            isinstance(why, MemoryError)
            or "allocate memory" in str(why)
            or "bad_alloc" in str(why)
            or "bad allocation" in str(why)
        ):
            return True
        why = why.__cause__ or why.__context__
    return False


def loaded(path: str, most_bytes: int = 16 << 20) -> dict[str, Any]:
    """Load a file and call it on its own example, if that is not too large to be worth it."""
    import torch
    from torch.utils import _pytree as pytree

    import aerogel
    from aerogel.errors import AerogelError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        fast = aerogel.load(path)
        assert fast.captured is not None
        blank = [t for t in pytree.tree_leaves(fast.captured.example) if isinstance(t, torch.Tensor)]
        if sum(t.numel() * t.element_size() for t in blank) > most_bytes:
            return {"kind": "large"}
        args, kwargs = fast.captured.filled()
        before = [t.clone() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = pytree.tree_leaves(fast(*args, **kwargs))
        str(aerogel.explain(fast))
    except AerogelError as why:
        return {
            "kind": "out of memory" if _starved(why) else "refused",
            "type": type(why).__name__,
            "says": str(why)[:300],
        }
    after = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    same = all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))
    tensors = [t for t in given if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    return {"kind": "valid", "unchanged": same, "gave": [t.flatten()[:8].tolist() for t in tensors]}
