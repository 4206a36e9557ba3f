"""Filters in CSR, lane by lane: what GPU methods store. `filter` names each lane's filter, -1 where there is
none, `start` where its nonzeros begin, then positions (c, r, s) flattened and values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aerogel.ir import Array, Conv


def unpack(a: Mapping[str, Array], conv: Conv) -> Array:
    """The weight again."""
    flat = np.zeros((conv.k, int(np.prod(conv.weight_shape[1:]))), a["value"].dtype)
    flat[np.repeat(a["filter"], np.diff(a["start"])), a["position"]] = a["value"]
    return flat.reshape(conv.weight_shape)


def sound(a: Mapping[str, Array], conv: Conv, lanes: int) -> bool:
    """Whether there are so many lanes, every filter is one of them, and positions are the layer's."""
    inside, lengths = int(np.prod(conv.weight_shape[1:])), np.diff(a["start"])
    good = len(a["filter"]) == lanes and len(a["start"]) == lanes + 1 and bool((lengths >= 0).all())
    good = good and a["start"][0] == 0 and a["start"][-1] == len(a["value"]) == len(a["position"])
    good = good and each_once(a["filter"], conv.k)
    return good and (not len(a["position"]) or bool(0 <= a["position"].min() <= a["position"].max() < inside))


def each_once(filters: Array, k: int) -> bool:
    """Whether every filter is named once, and all else is -1."""
    return np.array_equal(
        np.sort(filters.reshape(-1)), np.concatenate([np.full(filters.size - k, -1), np.arange(k)])
    )
