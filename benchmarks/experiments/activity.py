"""Zeros that ReLU makes in four networks: how many, which layers skip them, and what that gains.

    python -m benchmarks.experiments.activity FOLDER --models trained --json activity.json
        FOLDER has Fashion-MNIST's four .gz files
    python -m benchmarks.experiments.activity --photos-only --only vgg19
        full size, on photos (pip install scikit-image)
    python -m benchmarks.experiments.activity --show activity.json
        the layers of an earlier run

No weight is pruned. Each network twice: at a quarter of its width, trained here on Fashion-MNIST, 28 x 28
(and again after boost(), which may cost BUDGET of the accuracy on 5,000 training images); and at full size
with seeded weights on photos, 224 x 224. Calibrated on eight images (photos: four), timed on the first of
them, one thread. The claims are the TACO'23 paper's, over cuDNN on a GPU, for trained networks; its RegNetX
is 16GF, ours 800MF. `speedup` is over the faster torch layout, `by skipping` over the same network compiled
without actsparse: what is left is fewer calls and our layouts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import aerogel
from aerogel.methods import METHODS
from aerogel.runtime.eager import runner
from aerogel.tune.measure import interleaved
from aerogel.zoo.detectors import DenseNet121
from aerogel.zoo.models import Vgg19, make, regnetx, resnet50
from examples.fashion_mnist import accuracy, read, train

CLAIMS = {"vgg19": 1.97, "resnet50": 2.23, "densenet121": 2.74, "regnetx": 1.58}
SMALL: dict[str, Callable[[int], nn.Module]] = {
    "vgg19": Vgg19,
    "resnet50": resnet50,
    "densenet121": DenseNet121,
    "regnetx": regnetx,
}
PART, STEPS, BUDGET = 4, 500, 0.005
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png")


class Gray(nn.Module):
    """A network for colour images, fed images of one channel."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.expand(-1, 3, -1, -1))[:, :10]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--models", type=Path, help="a folder to keep trained networks in, and to take them from"
    )
    parser.add_argument("--only", choices=CLAIMS, action="append", help="this network; may be given again")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--photos-only", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 256 images")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path)
    given = parser.parse_args()
    if given.show:
        show(json.loads(given.show.read_text()), layers=True)
        return
    if not given.folder and not given.photos_only:
        parser.error("where is Fashion-MNIST? Give its folder, or --photos-only")
    names, rows, trained = given.only or list(CLAIMS), list[dict[str, Any]](), dict[str, nn.Module]()
    if not given.photos_only:
        data, test = read(given.folder, "train"), read(given.folder, "t10k")
        trained = {name: small(name, data, given) for name in names}
    if given.train_only:
        return
    torch.set_num_threads(1)
    for name, model in trained.items():
        before = accuracy(model, test)
        few = [test[0][i : i + 1] for i in range(8)]
        rows.append(measured(name, "Fashion-MNIST", model, few) | {"accuracy": before})
        part = data[0][:5000], data[1][:5000]
        boosted = aerogel.boost(model, few, evaluate=partial(accuracy, data=part), max_drop=BUDGET).model
        rows.append(
            measured(name, "Fashion-MNIST, boosted", boosted, few) | {"accuracy": accuracy(boosted, test)}
        )
    rows += [measured(name, "photos", make(name), photos()) for name in names]
    show({"networks": rows}, layers=False)
    if given.json:
        given.json.write_text(
            json.dumps(
                {"networks": rows, "date": date.today().isoformat(), "torch": torch.__version__}, indent=1
            )
        )


def small(name: str, data: tuple[Tensor, Tensor], given: argparse.Namespace) -> nn.Module:
    """A trained network at a quarter of its width."""
    torch.manual_seed(0)
    model = Gray(SMALL[name](PART))
    kept = given.models / f"{name}.safetensors" if given.models else None
    if kept and kept.exists():
        model.load_state_dict(load_file(kept))
        return model.eval()
    train(model, data, given.steps, 256, 3e-3, name)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), kept)
    return model.eval()


def photos() -> list[Tensor]:
    """The middle of real photos, 224 x 224, around zero."""
    import skimage
    from PIL import Image

    found = []
    for name in PHOTOS:
        image = Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        square = image.crop((left, top, left + side, top + side)).resize((224, 224))
        found.append(torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)[None].float() / 58 - 2)
    return found


def measured(name: str, on: str, model: nn.Module, inputs: list[Tensor]) -> dict[str, Any]:
    """Compiled for the first input, calibrated on all; every layer with its zeros and its times."""
    fast = aerogel.compile(model, (inputs[0],), calibration=inputs)
    others = aerogel.compile(
        model, (inputs[0],), calibration=inputs, methods=[m for m in METHODS if m != "actsparse"]
    )
    times = interleaved([runner(m, ((inputs[0],), {})) for m in (others, fast)], 31)
    layers = []
    for row, choice in zip(aerogel.explain(fast).layers, fast.plan.choices, strict=True):
        assert choice.idle is not None
        zeros = choice.idle.elements, choice.idle.vectors, choice.idle.tiles
        layers.append(
            {"layer": row["layer"], "conv": row["conv"], "method": choice.config.method, "zeros": zeros}
        )
        layers[-1] |= {"us": row["us"], "dense_us": row["dense_us"], "others": row["others"]}
    said = {
        "network": name,
        "on": on,
        "claim": CLAIMS[name],
        "speedup": fast.speedup or 1.0,
        "how": str(fast.how),
    }
    said["gain"] = float(np.median(times[0]) / np.median(times[1]))
    return said | {"target": str(fast.plan.target), "layers": layers}


def show(result: dict[str, Any], layers: bool) -> None:
    console = Console(width=140)
    table = Table(title="zeros that ReLU makes, no weight pruned, one thread")
    for heading in (
        "network",
        "on",
        "accuracy",
        "zero elements",
        "zero vectors",
        "layers that skip",
        "speedup",
        "by skipping",
        "paper, GPU",
    ):
        table.add_column(heading, justify="left" if heading in ("network", "on") else "right")
    for r in result["networks"]:
        table.add_row(
            r["network"],
            r["on"],
            *summary(r),
            f"{r['speedup']:.2f}x",
            f"{r['gain']:.2f}x",
            f"{r['claim']:.2f}x",
        )
    console.print(table)
    for r in result["networks"] if layers else ():
        own = Table(title=f"{r['network']}, {r['on']}", show_lines=False)
        for heading in ("layer", "problem", "elements", "vectors", "tiles", "chosen", "us", "dense us"):
            own.add_column(
                heading,
                justify="left" if heading in ("layer", "problem", "chosen") else "right",
                no_wrap=True,
            )
        for layer in r["layers"]:
            times = [f"{t:.0f}" if t else "" for t in (layer["us"], layer["dense_us"])]
            own.add_row(
                layer["layer"], layer["conv"], *(f"{z} %" for z in layer["zeros"]), layer["method"], *times
            )
        console.print(own)


def summary(r: dict[str, Any]) -> tuple[str, ...]:
    """Accuracy, zeros in the middle layer, and how many layers skip them."""
    middle = [int(np.median([layer["zeros"][i] for layer in r["layers"]])) for i in (0, 1)]
    skips = sum(layer["method"] == "actsparse" for layer in r["layers"])
    right = f"{r['accuracy']:.1%}" if "accuracy" in r else ""
    return right, f"{middle[0]} %", f"{middle[1]} %", f"{skips} of {len(r['layers'])}"


if __name__ == "__main__":
    main()
