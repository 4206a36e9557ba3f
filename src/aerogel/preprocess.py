"""A recipe: from an encoded image to what a model takes, written as one line of text.

    resize=256 crop=224 mean=0.485,0.456,0.406 std=0.229,0.224,0.225

As in torchvision: the shorter side is resized (bilinear, antialiased), the middle is cropped, values from 0
to 1 are normalised, channels come first. `resize=640x480` gives height and width, `bgr` turns the channels
around (mean and std are then in that order too), and one mean or std makes a grey image.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerogel.errors import AerogelError, InvalidArgument, printable
from aerogel.ir import Array
from aerogel.optional import import_optional

MOST_BYTES = 64 << 20
"""Of an encoded image."""
MOST_PIXELS = 64_000_000
"""Of an image, as it comes and as it is resized: a small file may say it is a huge one."""
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What is read; others of Pillow's start programs, or hold more than they say."""
_SIDE = r"[1-9][0-9]{0,5}"
_NUMBER = r"[0-9]*\.?[0-9]+(?:e-?[0-9]{1,2})?"
_SIDES = ("resize", "crop")
_WORDS = {
    "resize": rf"{_SIDE}(x{_SIDE})?",
    "crop": rf"{_SIDE}(x{_SIDE})?",
    "mean": rf"{_NUMBER}(,{_NUMBER},{_NUMBER})?",
    "std": rf"{_NUMBER}(,{_NUMBER},{_NUMBER})?",
}


class NoImage(AerogelError):
    """Bytes that are no image, or one that is too large."""


@dataclass(frozen=True)
class Recipe:
    """`resize` is the shorter side, or height and width; `crop` the middle's side, or height and width."""

    resize: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    bgr: bool = False

    @staticmethod
    def parse(text: str) -> Recipe:
        """A recipe from its text; an InvalidArgument where it says anything else."""
        found: dict[str, str] = {}
        bgr = False
        for word in text.split():
            name, _, value = word.partition("=")
            if word == "bgr":
                bgr = True
            elif name in found or name not in _WORDS or not re.fullmatch(_WORDS[name], value):
                raise InvalidArgument(
                    f"preprocess '{printable(word)[:60]}': a recipe looks like resize=256 crop=224 "
                    "mean=0.485,0.456,0.406 std=0.229,0.224,0.225 bgr"
                )
            else:
                found[name] = value
        sides: dict[str, Any] = {n: tuple(map(int, v.split("x"))) for n, v in found.items() if n in _SIDES}
        scales = {n: tuple(map(float, v.split(","))) for n, v in found.items() if n not in _SIDES}
        if any(not value for value in scales.get("std", ())):
            raise InvalidArgument("preprocess: std is a number above 0")
        if len({len(value) for value in scales.values()}) > 1 or (bgr and 1 in map(len, scales.values())):
            raise InvalidArgument("preprocess: mean and std have one number each, or three; grey has no bgr")
        return Recipe(**{**sides, **scales}, bgr=bgr)

    def __str__(self) -> str:
        words = [f"{n}={'x'.join(map(str, v))}" for n in ("resize", "crop") if (v := getattr(self, n))]
        words += [f"{n}={','.join(map(repr, v))}" for n in ("mean", "std") if (v := getattr(self, n))]
        return " ".join([*words, *(["bgr"] if self.bgr else [])])

    @property
    def channels(self) -> int:
        return 1 if 1 in (len(self.mean), len(self.std)) else 3

    def decoded(self, encoded: bytes) -> Array:
        """What the model takes of an encoded image; NoImage says why it is none."""
        pillow = _pillow()
        if len(encoded) > MOST_BYTES:
            raise NoImage(f"{len(encoded)} bytes; an image has at most {MOST_BYTES}")
        try:
            with pillow.open(io.BytesIO(encoded), formats=FORMATS) as image:
                _fits(image.size)
                return self._taken(image)
        except NoImage:
            raise
        except pillow.UnidentifiedImageError:
            raise NoImage("not an image: no format that is known") from None
        except Exception as why:  # Pillow raises what it meets: OSError, SyntaxError, struct.error, ...
            raise NoImage(f"not an image that can be read: {type(why).__name__}: {str(why)[:120]}") from None

    def applied(self, pixels: Array) -> Array:
        """The same of an image as bytes a pixel: height x width x channels, or height x width."""
        pillow = _pillow()
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or not pixels.size:
            raise NoImage(f"an image is uint8, height x width x channels, not {pixels.dtype} {pixels.shape}")
        _fits(pixels.shape[:2])
        try:
            return self._taken(pillow.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))
        except (TypeError, ValueError) as why:
            raise NoImage(f"not an image that can be read: {why}") from None

    def _taken(self, image: Any) -> Array:
        image = image.convert("L" if self.channels == 1 else "RGB")
        _fits(image.size)
        if self.resize:
            width, height = _resized(image.size, self.resize)
            _fits((width, height))
            image = image.resize((width, height), _pillow().Resampling.BILINEAR)
        if self.crop:
            height, width = self.crop[0], self.crop[-1]
            _fits((width, height))
            left, top = round((image.width - width) / 2), round((image.height - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        pixels: Array = np.asarray(image, np.float32).reshape(image.height, image.width, -1)
        pixels = (pixels[..., ::-1] if self.bgr else pixels) / np.float32(255)
        if self.mean:
            pixels = pixels - np.asarray(self.mean, np.float32)
        if self.std:
            pixels = pixels / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pillow() -> Any:
    import_optional("PIL.Image", "images", "Reading images")
    import PIL.Image

    return PIL.Image


def _fits(size: tuple[int, ...]) -> None:
    if math.prod(size) > MOST_PIXELS:
        raise NoImage(f"{size[0]} x {size[1]} pixels; an image has at most {MOST_PIXELS}")


def _resized(size: tuple[int, int], asked: tuple[int, ...]) -> tuple[int, int]:
    """Width and height; the longer side follows the shorter, rounded down as torchvision does."""
    if len(asked) == 2:
        return asked[1], asked[0]
    width, height = size
    if width <= height:
        return asked[0], max(1, int(asked[0] * height / width))
    return max(1, int(asked[0] * width / height)), asked[0]
