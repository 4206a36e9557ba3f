"""Real inputs for `aerogel prune` and `slim`: a folder of images, or a file of arrays, as calls of the model.

Every call has the sizes of the example, its batch too: those are known to run. Of more inputs than are asked
for, some are taken at even steps, since folders are often sorted by class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.cli.words import first_line
from aerogel.errors import AerogelError
from aerogel.ir import Array
from aerogel.preprocess import MOST_BYTES, NoImage, Recipe
from aerogel.serving.inputs import IMAGES

Calls = list[tuple[torch.Tensor, ...]]
_RECIPE = '--preprocess "resize=256 crop=224 mean=0.485,0.456,0.406 std=0.229,0.224,0.225"'


def read_calls(
    path: Path, names: Sequence[str], example: Sequence[Any], most: int, recipe: str | None = None
) -> Calls:
    """At most so many samples, as calls like the example. `names` are those of the inputs, `recipe` says how
    an image becomes one."""
    if not example or not all(isinstance(v, torch.Tensor) and v.dim() for v in example):
        raise AerogelError("--calibration is for models whose inputs are tensors with a batch")
    if not path.exists():
        raise AerogelError(f"'{path}' cannot be read: there is no such file or folder")
    if path.is_dir():
        found = [_images(path, example, most, recipe)]
    elif path.suffix in (".npy", ".npz"):
        found = _arrays(path, names, example, most)
    else:
        raise AerogelError(
            f"'{path}' is neither: --calibration is a folder of images, or a .npy or .npz file of arrays"
        )
    batch, count = example[0].shape[0], len(found[0])
    if count < batch:
        raise AerogelError(
            f"'{path}' has {count} samples and a call takes {batch}: give more of them and larger --images, "
            "or a --shape with a smaller batch"
        )
    starts = range(0, count - batch + 1, batch)
    return [tuple(torch.from_numpy(np.array(v[at : at + batch])) for v in found) for at in starts]


def _images(folder: Path, example: Sequence[torch.Tensor], most: int, recipe: str | None) -> Array:
    """The images below a folder, each as the recipe makes it."""
    if len(example) != 1:
        raise AerogelError(
            f"the model takes {len(example)} inputs and images are one: give a .npz file with an array for "
            "each"
        )
    if recipe is None:
        raise AerogelError(f"how an image becomes an input is not known: say it, as in {_RECIPE}")
    how, wanted = Recipe.parse(recipe), tuple(example[0].shape[1:])
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES and p.is_file())
    if not files:
        raise AerogelError(f"no images in '{folder}'. They end in {', '.join(IMAGES)}.")
    found = []
    for file in _some(files, most):
        try:
            if file.stat().st_size > MOST_BYTES:
                raise NoImage(f"more than {MOST_BYTES} bytes")
            image = how.decoded(file.read_bytes())
        except (NoImage, OSError) as why:
            raise AerogelError(f"'{file}' cannot be used: {first_line(why)}. Take it away.") from None
        if image.shape != wanted:
            raise AerogelError(
                f"'{file}' becomes {_by(image.shape)} and the model takes {_by(wanted)}: say --preprocess "
                f"with resize={_by(wanted[1:])}, or --shape with other sizes"
            )
        found.append(image)
    return np.stack(found)


def _arrays(path: Path, names: Sequence[str], example: Sequence[torch.Tensor], most: int) -> list[Array]:
    """An array for each input, its first dimension the samples."""
    try:
        with path.open("rb") as file:
            held = np.load(file, allow_pickle=False)  # a pickle may run anything
            found = {"": held} if isinstance(held, np.ndarray) else {name: held[name] for name in held.files}
    except Exception as why:  # numpy lets through whatever a damaged header makes Python's parser say
        raise _unreadable(path, first_line(why)) from None
    others = [name for name, array in found.items() if not isinstance(array, np.ndarray)]
    if others:
        raise _unreadable(path, f"'{others[0]}' in it is no array")
    if len(found) == len(example) == 1:
        found = dict.fromkeys(names[:1] or ("",), next(iter(found.values())))
    if sorted(found) != sorted(names):
        raise AerogelError(
            f"'{path}' holds {', '.join(map(repr, sorted(found))) or 'nothing'} and the model takes "
            f"{', '.join(map(repr, names))}: write numpy.savez(path, **{{name: array}})"
        )
    if len({_samples(array) for array in found.values()}) != 1:
        raise AerogelError(f"the arrays of '{path}' have different numbers of samples: each has the same")
    return [_fitting(path, name, found, value, most) for name, value in zip(names, example, strict=True)]


def _unreadable(path: Path, why: str) -> AerogelError:
    return AerogelError(
        f"'{path}' cannot be read: {why}. Write plain numbers with numpy.save or numpy.savez."
    )


def _fitting(path: Path, name: str, found: Mapping[str, Array], like: torch.Tensor, most: int) -> Array:
    """One input's samples, in its type and of its sizes."""
    array, dtype = found[name], like.numpy().dtype
    same = array.dtype == dtype or (array.dtype.kind == dtype.kind == "f")
    if not same or array.shape[1:] != tuple(like.shape[1:]):
        raise AerogelError(
            f"'{name}' in '{path}' is {array.dtype} of {_by(array.shape)}; the model takes {dtype} of "
            f"Nx{_by(like.shape[1:])}, N being the samples"
        )
    with np.errstate(over="ignore"):
        picked: Array = array[_some(range(_samples(array)), most)].astype(dtype)
    if dtype.kind == "f" and not np.isfinite(picked).all():
        raise AerogelError(
            f"'{path}' has NaN or infinity in '{name}', and nothing can be fitted to that: take such samples "
            "out"
        )
    return picked


def _samples(array: Array) -> int:
    return len(array) if array.ndim else 0


def _some(things: Sequence[Any], most: int) -> list[Any]:
    """All of them, or so many at even steps."""
    count = min(most, len(things))
    return [things[i * len(things) // count] for i in range(count)]


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
