"""prune(): the least important weights go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aerogel.errors import InvalidArgument
from aerogel.progress import shown
from aerogel.pruning.asked import FROM_DATA, Sparsity, chosen, masked
from aerogel.pruning.gram import check_first
from aerogel.pruning.held import mark
from aerogel.pruning.layers import filters_first, under
from aerogel.pruning.mistakes import several
from aerogel.pruning.norms import estimate
from aerogel.pruning.permute import permuted
from aerogel.pruning.repair import calls_of, repaired, there


def prune(
    model: nn.Module,
    sparsity: Sparsity,
    *,
    pattern: str = "unstructured",
    scope: str | None = None,
    score: str = "magnitude",
    exclude: Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
    permute: Any = None,
    progress: bool | None = None,
) -> nn.Module:
    """Mask the least important weights of every convolution and Linear, in place; the model is returned.

    Train on as you like: masks hold. `finalize` makes them part of the weights; `compile` does not need it.
    What is zero already is least important, so calling again with more only adds zeros.

    With `score="obs"` the weights that stay make good for those that go (Optimal Brain Surgeon): layer by
    layer they are fitted to what the dense model's layer answers on `calibration`. No labels, no training.

    Example:
        >>> pruned = aerogel.prune(model, 0.9, exclude=["0"])

    Args:
        model: Any module.
        sparsity: The share of zeros; or `{layer: share}`, or `{layer: (pattern, share)}`, and layers not
            named keep what they have; or the `Advice` that `advise` gave for a speedup, or a `Slimmed`.
        pattern: "unstructured", "4x1" (blocks of filters x input channels), "2:4" (two of four input
            channels stay), "tilewise" (TW-2D), "tw1d" or "tew".
        scope: The share is that of each layer ("uniform"), of all together ("global"), spread so that
            larger layers lose more ("erk"), or so that the answers on `calibration` change least ("error").
            By default "error" for obs, else "uniform"; shares of single layers are theirs.
        score: "magnitude"; "taylor" (the size of weight x gradient: call `backward()` first); "wanda"
            (weight x size of its input) or "obs", which look at `calibration`.
        exclude: Layers to leave alone.
        calibration: Calls of the model on real inputs, a few hundred images: a list of tensors, of tuples of
            arguments or of dicts of them, a DataLoader of those, or one tensor of images, which is split into
            calls of 32. Batch norm is estimated again on it.
        permute: An example call, as for `compile`. Channels are first put in the order in which blocks of
            pattern "1x4" lose least, in all layers that share them: the model answers as before. Before an
            optimizer has state.
        progress: False shows no progress, True also where nobody seems to look.
    """
    left_out = several(exclude, "exclude", "exclude=['head']")
    each = isinstance(sparsity, Mapping) or hasattr(sparsity, "recipe")
    scope = "uniform" if each else scope or ("error" if score == "obs" else "uniform")
    asked = chosen(model, sparsity, pattern, scope, score, left_out)
    if scope == "error" and score == "taylor":
        raise InvalidArgument(
            "scope 'error' goes with score 'magnitude', 'wanda' or 'obs': say scope='global'"
        )
    looks = score if score in FROM_DATA else "scope 'error'" if scope == "error" else ""
    calls = calls_of(calibration, looks or score) if looks or calibration is not None else []
    if calls:
        calls = there(model, calls)
        check_first(model, calls[0])  # what does not run is said before anything changes
    if permute is not None:
        with shown(progress) as line, torch.no_grad():
            permuted(model, permute, asked, line)
    if looks:
        with shown(progress) as line:
            return repaired(model, asked, scope, score, calls, line)
    with torch.no_grad():
        scores = {name: _score(name, one.module, score) for name, one in asked.items()}
        for name, kept in masked(scores, asked, scope).items():
            mark(asked[name].module, kept)
        if calls:
            estimate(model, calls)
    return model


def _score(name: str, module: nn.Module, how: str) -> Tensor:
    weight: Any = module.weight
    if how == "magnitude":
        return filters_first(module, torch.as_tensor(weight).abs().cpu())
    gradient = under(module).grad
    if gradient is None:
        raise InvalidArgument(
            f"score 'taylor' needs gradients, and '{name}' has none: call backward() on a loss first"
        )
    return filters_first(module, (weight * gradient).abs().cpu())
