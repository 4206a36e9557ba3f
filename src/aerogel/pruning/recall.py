"""A network run again and again with one layer changed: the products before that layer are remembered.

Whatever a network is made of, torch shows its products (convolutions, matrices) one by one. A run that is
recorded keeps what they answer; a run with one layer changed takes from there what comes before the layer,
and computes from the layer on. The answers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from aerogel.pruning.judge import Answers, answers
from aerogel.runtime.eager import Call

MOST_BYTES = 256 << 20
"""Of answers that are kept; products after that are computed each time."""


class Recall:
    """Of a network on some calls."""

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        self._model, self._calls = model, calls
        self._products = [list[_Product]() for _ in calls]
        self._room = MOST_BYTES
        self.wanted = [self._recorded(*one) for one in zip(calls, self._products, strict=True)]
        """What the network answers as it is."""

    def answers(self, changed: nn.Module) -> Answers:
        """What the network answers with this layer of it changed."""
        return [self._again(changed, *one) for one in zip(self._calls, self._products, strict=True)]

    def _recorded(self, call: Call, products: list[_Product]) -> list[Tensor]:
        def look(func: Any, sizes: _Sizes, run: Callable[[], Any]) -> Any:
            answer = run()
            fits = isinstance(answer, Tensor) and answer.nbytes <= self._room
            self._room -= answer.nbytes * fits
            products.append(_Product(func, sizes, answer.clone() if fits else None))
            return answer

        with _Products(look):
            return answers(self._model, [call])[0]

    def _again(self, changed: nn.Module, call: Call, products: Sequence[_Product]) -> list[Tensor]:
        """As long as its products come as they came before, and the changed layer does not."""
        left: Iterator[_Product] = iter(products)

        def look(func: Any, sizes: _Sizes, run: Callable[[], Any]) -> Any:
            nonlocal left
            known = next(left, None)
            if known is None or (known.what, known.sizes) != (func, sizes):
                left = iter(())
            elif known.answer is not None:
                return known.answer.clone()  # what follows may write into it
            return run()

        def reached(*_: Any) -> None:
            nonlocal left
            left = iter(())

        hook = changed.register_forward_pre_hook(reached)
        try:
            with _Products(look):
                return answers(self._model, [call])[0]
        finally:
            hook.remove()


_Sizes = tuple[torch.Size, ...]


class _Product(NamedTuple):
    """One product of a run: what it was, what it was given, and its answer where that is kept."""

    what: Any
    sizes: _Sizes
    answer: Tensor | None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows `look` each product while it is entered: the operator, what it is given, and how to run it."""

    supports_higher_order_operators = True

    def __init__(self, look: Callable[[Any, _Sizes, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) not in flop_registry:
            return run()
        return self._look(func, tuple(one.shape for one in args if isinstance(one, Tensor)), run)
