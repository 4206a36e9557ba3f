"""All calls of a network, stopped before the same layer: it is fitted, and then they go on.

Layers looked at one after another would take a run of the network up to each. Here every call has a thread of
its own that waits at each layer until it is told to go on, so the network runs once. What does not go so is
looked at one by one, as ever: layers that run several times in a call, maps too large to keep those of all
calls, networks that fail in a thread or remember something from one layer to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor, nn

from aerogel.pruning.gram import inference, watched
from aerogel.runtime.eager import Call, alike

MOST_CALLS, MOST_BYTES = 64, 192 << 20
"""Threads, and what a layer is given by all calls together: some such maps are alive at once."""
LOOKED_AT = 2
"""Calls whose answers are compared at the end."""
END = 1 << 60
"""The number of the layer that comes after all others."""


class Lost(Exception):
    """The calls cannot go together."""


class _Stopped(BaseException):
    """The rest of a call is not wanted."""


class _Run:
    """One call in its thread: `on` lets it go to the next layer, where `number` and `x` say what it gives."""

    def __init__(self, walk: Walk, model: nn.Module, call: Call) -> None:
        self.number, self.x, self.answer = -1, cast(Tensor | None, None), cast(Any, None)
        self.failed: BaseException | None = None
        self._walk, self._model, self._call = walk, model, call
        self._go, self._there = SimpleQueue[bool](), SimpleQueue[None]()
        self._thread = threading.Thread(target=self._whole, daemon=True)
        self._thread.start()
        self.arrived()

    def _whole(self) -> None:
        self._walk.here.run = self
        torch.get_num_threads()  # what torch does first in a thread, and would undo the next line
        torch.set_num_threads(1)  # of this thread: as many calls run at once as torch has threads
        try:
            self.stop(-1, None)
            with torch.no_grad():
                self.answer = self._model(*self._call[0], **self._call[1])
        except _Stopped:
            pass
        except BaseException as why:  # whatever a model raises
            self.failed = why
        self.number, self.x = END, None
        self._there.put(None)

    def stop(self, number: int, x: Tensor | None) -> None:
        """In the thread: wait before a layer."""
        self.number, self.x = number, x
        self._there.put(None)
        if not self._go.get():
            raise _Stopped

    def on(self) -> None:
        self._go.put(True)

    def arrived(self) -> None:
        self._there.get()

    def end(self) -> None:
        self._go.put(False)
        self._thread.join()


class Walk:
    """Of a network's calls along its layers, in their order. Raises `Lost` where they cannot go together."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], calls: Sequence[Call]) -> None:
        self.here = threading.local()  # a thread's identifier is given again to one that starts after it
        self._model, self._calls, self._runs = model, calls, list[_Run]()
        self._number = {module: number for number, module in enumerate(modules)}
        self._first = _first(model, modules, calls)
        self._hooks: list[Any] = []
        self._mode = inference(model)

    def __enter__(self) -> Walk:
        self._mode.__enter__()
        if self._first == len(self._number):
            return self
        threads, hook = torch.get_num_threads(), cast(Any, self._hook)
        self._hooks = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in self._number]
        try:
            for call in self._calls:
                self._runs.append(_Run(self, self._model, call))
        except RuntimeError as why:  # no further thread may be started
            self.__exit__()
            raise Lost from why
        finally:
            torch.set_num_threads(threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._mode.__exit__(None, None, None)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for run in self._runs:
            run.end()
        self._hooks, self._runs = [], []

    def _hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        run: _Run | None = getattr(self.here, "run", None)
        if run is not None:
            run.stop(self._number[module], args[0] if args else kwargs["input"])

    def inputs(self, module: nn.Module) -> list[Tensor] | None:
        """What each call gives the layer; None where that must be looked at otherwise, as where a call does
        not come by."""
        number = self._number[module]
        if number < self._first or not self._runs:
            return None
        self._on(number)
        found = [run.x for run in self._runs if run.number == number and run.x is not None]
        return found if len(found) == len(self._runs) else None

    def _on(self, number: int) -> None:
        """Every call goes on to this layer, or beyond where it does not come by."""
        while behind := [run for run in self._runs if run.number < number][: torch.get_num_threads()]:
            for run in behind:
                run.on()
            for run in behind:
                run.arrived()
                if run.failed is not None:
                    raise Lost from run.failed

    def check(self) -> None:
        """The calls end with what the network answers to each alone: not so where it remembers something of
        another call."""
        self._on(END)
        for run, (args, kwargs) in zip(self._runs[:LOOKED_AT], self._calls, strict=False):
            if not alike(self._model(*args, **kwargs), run.answer):
                raise Lost


def _first(model: nn.Module, modules: Sequence[nn.Module], calls: Sequence[Call]) -> int:
    """The layer from which on the maps of all calls can be kept."""
    if len(calls) > MOST_CALLS:
        return len(modules)
    sizes = dict.fromkeys(modules, 0)

    def taken(module: nn.Module) -> Any:
        def look(_: int, x: Tensor, y: Tensor) -> None:
            sizes[module] = max(sizes[module], x.nbytes)

        return look

    watched(model, {module: taken(module) for module in modules}, calls[:1])
    return max((i + 1 for i, m in enumerate(modules) if sizes[m] * len(calls) > MOST_BYTES), default=0)
