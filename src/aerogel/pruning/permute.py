"""Channels in the order in which blocks of neighbours lose least, the model's answers unchanged.

A block of M neighbouring input channels goes whole, so it costs least where the M are unimportant to the same
filters. Which channels are neighbours is free: the layers that give them and the layers that read them only
have to agree (ties.py). As tools for 2:4 do (Pool and Yu, NeurIPS 2021), channels of two blocks change places
as long as the blocks that would stay gain by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aerogel.backends import backend_of
from aerogel.errors import AerogelError, InvalidArgument
from aerogel.progress import Progress
from aerogel.pruning.asked import Asked
from aerogel.pruning.gram import inference
from aerogel.pruning.held import Mask
from aerogel.pruning.layers import filters_first, under
from aerogel.pruning.masks import as_block
from aerogel.pruning.ties import INPUT, Sets, Ties
from aerogel.runtime.eager import alike, answer, as_call
from aerogel.runtime.onnxmodel import OnnxModel
from aerogel.runtime.private import copied, private
from aerogel.runtime.reading import network_of
from aerogel.runtime.weights import as_weights

SWEEPS = 8
"""Over all channels, at most."""
WORK = 4e9
"""Numbers that the sweeps over one set of channels look at: of more, only some filters are looked at. Counted
and not timed, so that the order does not depend on the machine."""
GAIN = 1e-6
"""Of what is kept: a smaller gain is rounding."""


class Place(NamedTuple):
    """Where a constant of the graph is in the model: tensors of one shape (a weight and its masks), and which
    of their dimensions the constant's are."""

    tensors: tuple[Tensor, ...]
    axes: tuple[int, ...]


def permuted(model: nn.Module, args: Any, asked: Mapping[str, Asked], progress: Progress) -> None:
    """Put channels in the order in which blocks of the layers asked for lose least, in place."""
    blocks = {name: as_block(one.pattern) for name, one in asked.items()}
    wide = {block[1] for block in blocks.values() if block is not None and block[0] == 1 and block[1] > 1}
    if len(wide) != 1:
        raise InvalidArgument(
            "permute= orders input channels for blocks of one filter, pattern='1x4'; every such layer has "
            "blocks of the same size"
        )
    call = as_call(args, None)
    progress.begin("reading the model", 0.1)
    still = as_weights(copied(model)).eval()
    here, (there,) = backend_of(call).host(private(still, call), [call])
    captured = network_of(here, there, None)[0].captured
    ties = Ties(captured)
    places: dict[str, Place] = {}
    for name in ties.uses:
        place = _place(model, name)
        if place is None:
            ties.hold(name, f"'{name}' is computed from other numbers")
        else:
            places[name] = place
    own = {
        id(under(one.module)): name
        for name, one in asked.items()
        if blocks[name] == (1, *wide) and filters_first(one.module, under(one.module)).shape[1] > max(wide)
    }
    layers = {
        own[id(place.tensors[0])]: name
        for name, place in places.items()
        if name in ties.readers and id(place.tensors[0]) in own
    }
    _say(ties, layers, list(own.values()))
    orders = _orders(ties, places, layers, asked, next(iter(wide)), progress)
    with inference(model), torch.random.fork_rng(devices=[]):
        before = answer(model, call)
        _apply(ties, places, orders)
        if not alike(before, answer(model, call)):
            _apply(ties, places, {number: order.argsort() for number, order in orders.items()})
            raise AerogelError(
                "permute= would change the model's answers: its Python treats channels in a way that "
                "torch.export does not show. It is as it was; leave permute out"
            )


def _place(model: nn.Module, name: str) -> Place | None:
    """None where the model computes the constant, so that no tensor of it can be put in order."""
    axes: tuple[int, ...] = ()
    if isinstance(model, OnnxModel):
        found = model.written(name)
        if found is None:
            return None
        name, axes = found
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    if parametrize.is_parametrized(module, leaf):
        held: Any = module.parametrizations
        own = list(held[leaf])
        if not all(isinstance(one, Mask) for one in own):
            return None
        tensors = held[leaf].original, *(one.mask for one in own)
    else:
        tensor: Tensor | None = {**module._buffers, **module._parameters}.get(leaf)
        if tensor is None:
            return None
        tensors = (tensor,)
    return Place(tensors, axes or tuple(range(tensors[0].dim())))


def _say(ties: Ties, layers: Mapping[str, str], every: Sequence[str]) -> None:
    """Which layers' inputs stay in their order, and why; a layer that reads the image is no news."""
    said = {name: "torch.export does not show its input" for name in every if name not in layers}
    for layer, name in layers.items():
        why = [ties.held(number) for number in ties.uses[name][ties.readers[name]]]
        if why and all(why) and why[0] != INPUT:
            said[layer] = why[0]
    if said:
        listed = "; ".join(f"'{layer}': {why}" for layer, why in said.items())
        warnings.warn(f"input channels that stay in their order: {listed}", stacklevel=4)


def _orders(
    ties: Ties,
    places: Mapping[str, Place],
    layers: Mapping[str, str],
    asked: Mapping[str, Asked],
    wide: int,
    progress: Progress,
) -> dict[int, Tensor]:
    """For each set of channels that gains by it: which old channel comes at each place."""
    readers: dict[int, list[tuple[str, int]]] = {}
    for layer, name in layers.items():
        at = 0
        for number in ties.uses[name][ties.readers[name]]:
            if not ties.held(number):
                readers.setdefault(ties.root(number), []).append((layer, at))
            at += ties.sizes[number]
    found = {}
    progress.begin("ordering channels", 0.3)
    for count, (number, own) in enumerate(readers.items(), 1):
        size = ties.sizes[number]
        progress.step("set of channels", count, len(readers), own[0][0])
        rows, edges = list[Tensor](), list[Tensor]()
        for layer, first in own:
            name, share = layers[layer], asked[layer].share
            whole = _columns(places[name], ties.readers[name])
            some = whole[first : first + size]
            edge = _edge(whole, share, wide)
            rows.append(some / whole.sum().clamp_min(1e-30))
            edges.append((edge / whole.sum().clamp_min(1e-30)).expand(some.shape[1]))
        every, all_edges = torch.cat(rows, 1), torch.cat(edges)
        few = max(1, int(WORK / SWEEPS / 2 / size**2))
        some_rows = torch.linspace(0, every.shape[1] - 1, min(few, every.shape[1])).long()
        order = ordered(every[:, some_rows], all_edges[some_rows], wide)
        if not order.equal(torch.arange(size)):
            found[number] = order
    return found


def _columns(place: Place, dim: int) -> Tensor:
    """Sizes of a layer's weights, a row for each of its input channels."""
    weight, *kept = place.tensors
    size = weight.detach().abs().float().cpu()
    for mask in kept:
        size = size * mask.cpu()
    return size.movedim(place.axes[dim], 0).flatten(1)


def _edge(columns: Tensor, share: float, wide: int) -> Tensor:
    """The sum from which on a block stays, at this share of zeros in the order as it is."""
    sums = columns[: len(columns) // wide * wide].reshape(-1, wide, columns.shape[1]).sum(1).flatten()
    return sums.kthvalue(int(share * sums.numel())).values if share * sums.numel() >= 1 else torch.zeros(())


def ordered(columns: Tensor, edges: Tensor, wide: int) -> Tensor:
    """The order of channels (rows of `columns`) in which blocks of `wide` keep most beyond the `edges` of
    their columns. Channels at the end that make no whole block stay there."""
    count = len(columns) // wide * wide
    order, own = torch.arange(len(columns)), columns[:count].clone()
    if count <= wide:
        return order
    block = torch.arange(count) // wide
    sums = own.reshape(-1, wide, own.shape[1]).sum(1)
    worth = (sums - edges).relu_().sum(1)
    rest = sums[block] - own - edges
    least = GAIN * float(worth.sum() + 1e-30)
    for _ in range(SWEEPS):
        moved = 0
        for i in range(count):
            a = int(block[i])
            gain = (own + rest[i]).relu_().sum(1) + (rest + own[i]).relu_().sum(1) - worth[a] - worth[block]
            gain[block == a] = 0.0
            j = int(gain.argmax())
            if float(gain[j]) <= least:
                continue
            b, moved = int(block[j]), moved + 1
            order[[i, j]], own[[i, j]] = order[[j, i]], own[[j, i]]
            for one in (a, b):
                at = slice(one * wide, one * wide + wide)
                sums[one] = own[at].sum(0)
                worth[one] = (sums[one] - edges).relu_().sum()
                rest[at] = sums[one] - own[at] - edges
        if not moved:
            break
    return order


def _apply(ties: Ties, places: Mapping[str, Place], orders: Mapping[int, Tensor]) -> None:
    for name, place in places.items():
        for dim, sets in ties.uses[name].items():
            if any(ties.root(number) in orders for number in sets):
                index = _index(ties, sets, orders)
                gradients = [t.grad for t in place.tensors if t.grad is not None]
                for tensor in (*place.tensors, *gradients):
                    tensor.data.copy_(tensor.data.index_select(place.axes[dim], index.to(tensor.device)))


def _index(ties: Ties, sets: Sets, orders: Mapping[int, Tensor]) -> Tensor:
    """Sets side by side, each in its order."""
    found, at = list[Tensor](), 0
    for number in sets:
        size = ties.sizes[number]
        found.append(at + orders.get(ties.root(number), torch.arange(size)))
        at += size
    return torch.cat(found)
