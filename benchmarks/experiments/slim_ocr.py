"""Real files without any training code: rapidocr's reader and detector, pruned with rendered text as
calibration, read by rapidocr itself.

    python -m benchmarks.experiments.slim_ocr reader --json slim_ocr.json
    python -m benchmarks.experiments.slim_ocr detector --shares 0.5,0.7 --ways magnitude,obs,heal

300 lines of English words are rendered (fonts, sizes, positions and noise vary) and read by rapidocr with the
file as it came; then with the pruned one in its place. The reader is given lines, the detector pages with a
line somewhere. `same` is the share of lines whose text is exactly as before. `magnitude` is one shot, each
layer alike; `obs` is prune(score="obs") with shares by measured error, `heal` the same and then label-free
healing; `dense` (with --shares 0) is the file as it came. `ours` and `onnxruntime` are milliseconds for one
input of the usual size, one thread, interleaved: the pruned file compiled, and onnxruntime on it. Measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table
from torch import nn

import aerogel
from aerogel.ir.target import host
from aerogel.tune.measure import interleaved
from benchmarks.experiments.slim import Repair

LINES, CALLS, HEALED, STEPS, RATE = 300, 12, 64, 120, 1e-5
"""Lines that are read; calls that weights are fitted to, and those that healing learns from; its steps, and
their rate: these files have their batch norm folded, and ten times that leads away."""
SHAPES = {"reader": (8, 3, 48, 320), "detector": (2, 3, 320, 640)}
PAGES = {"reader": (48, 320), "detector": (160, 480)}
KEYS = {"reader": "Rec.model_path", "detector": "Det.model_path"}
NAMES = {"reader": "*rec*.onnx", "detector": "*det*.onnx"}
WAYS = ("magnitude", "obs", "heal")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=SHAPES)
    parser.add_argument("--shares", default="0.3,0.5,0.6,0.7,0.8,0.9")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--steps", type=int, default=STEPS, help="of healing")
    parser.add_argument(
        "--untimed", action="store_true", help="leave out the milliseconds, which take minutes"
    )
    parser.add_argument("--files", type=Path, help="where the pruned files go, to be timed by a later call")
    parser.add_argument("--json", type=Path, help="results; what is in it already is not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    work = Work(given)
    for row in found:
        work.add_times(row)
        keep(found, given.json)
    for share in map(float, given.shares.split(",")):
        for way in given.ways.split(","):
            if any((r["part"], r["way"], r["share"]) == (given.part, way, share) for r in found):
                continue
            found.append(work.run(way, share))
            print(json.dumps(found[-1]), flush=True)
            keep(found, given.json)
    show([row for row in found if row["part"] == given.part])


def keep(rows: list[dict[str, Any]], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(rows, indent=1))


class Work:
    """One file: calibration calls, the lines to read, and what the file itself reads."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.part, self.steps, self.timed = given.part, given.steps, not given.untimed
        part, lines, self.folder = given.part, given.lines, given.files or Path(mkdtemp())
        self.folder.mkdir(parents=True, exist_ok=True)
        origin = find_spec("rapidocr")
        assert origin is not None
        assert origin.origin is not None
        (self.path,) = (Path(origin.origin).parent / "models").glob(NAMES[part])
        self.dense = aerogel.OnnxModel(self.path, {self._input(): SHAPES[part]})
        random = np.random.default_rng(1)
        batch, _, height, width = SHAPES[part]
        self.many = [
            torch.stack([self._pixels(rendered(random, height, width)) for _ in range(batch)])
            for _ in range(HEALED)
        ]
        random = np.random.default_rng(2)
        self.pages = [np.asarray(rendered(random, *PAGES[part])) for _ in range(lines)]
        self.wanted = self._read(self.path)
        self.repair = Repair(self.dense, self.many[:CALLS])

    def run(self, way: str, share: float) -> dict[str, Any]:
        """One way at one share."""
        began = time.monotonic()
        out = self._out(way, share)
        if way == "dense":
            out.write_bytes(self.path.read_bytes())
        else:
            aerogel.finalize(self._made(way, share)).save(out)  # type: ignore[operator]
        seconds = time.monotonic() - began
        got = self._read(out)
        right = sum(a == b for a, b in zip(self.wanted, got, strict=True)) / len(got)
        row = {
            "part": self.part,
            "way": way,
            "share": share,
            "same": right,
            "lines": len(got),
            "seconds": seconds,
            "ours_ms": None,
            "onnxruntime_ms": None,
            "file": self.path.name,
            "target": str(host()),
            "date": date.today().isoformat(),
        }
        self.add_times(row)
        return row

    def add_times(self, row: dict[str, Any]) -> None:
        """Milliseconds in a row of this part that has none, where its pruned file is at hand."""
        out = self._out(row["way"], row["share"])
        if self.timed and row["part"] == self.part and row["ours_ms"] is None and out.exists():
            row["ours_ms"], row["onnxruntime_ms"] = self._times(out)

    def _out(self, way: str, share: float) -> Path:
        return self.folder / f"{self.part}-{way}-{share}.onnx"

    def _made(self, way: str, share: float) -> nn.Module:
        if way == "heal":
            there = self._out("obs", share)
            if not there.exists():
                aerogel.finalize(self._made("obs", share)).save(there)  # type: ignore[operator]
            start = aerogel.OnnxModel(there, {self._input(): SHAPES[self.part]})
            return aerogel.heal(
                start, self.many, teacher=self.dense, steps=self.steps, rate=RATE, progress=True
            )
        model = copy.deepcopy(self.dense)
        if way == "magnitude":
            return aerogel.prune(model, share)
        return self.repair.pruned(share, progress=True)

    def _times(self, out: Path) -> tuple[float, float]:
        """Milliseconds of the compiled file and of onnxruntime."""
        import onnxruntime

        shape = (1, *SHAPES[self.part][1:])
        fast = aerogel.compile(out, shapes={self._input(): shape})
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(out), options)
        x = np.random.default_rng(0).random(shape, np.float32)
        feed = {self._input(): x}
        ours, theirs = interleaved([lambda: fast.run(None, feed), lambda: session.run(None, feed)], 20)
        return float(np.median(ours)) / 1e3, float(np.median(theirs)) / 1e3

    def _input(self) -> str:
        import onnx

        return str(onnx.load(str(self.path), load_external_data=False).graph.input[0].name)

    def _pixels(self, image: Image.Image) -> torch.Tensor:
        """As rapidocr prepares them: the reader from -1 to 1, the detector likewise."""
        pixels = torch.from_numpy(np.asarray(image, np.float32)[:, :, ::-1].copy())
        return pixels.permute(2, 0, 1) / 127.5 - 1

    def _read(self, path: Path) -> list[str]:
        """What rapidocr reads on each page with this file in its place."""
        from rapidocr import RapidOCR

        params = {
            KEYS[self.part]: str(path),
            "Global.use_cls": False,
            "Global.use_det": self.part == "detector",
            "Global.log_level": "error",
            "Det.limit_type": "max",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
        engine: Any = RapidOCR(params=params)
        return [" ".join(engine(page).txts or ()) for page in self.pages]


def rendered(random: np.random.Generator, height: int, width: int) -> Image.Image:
    """A line of words, and sometimes a number, on a page of this size."""
    import matplotlib

    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVu*.ttf"))
    fonts = [f for f in fonts if "Display" not in f.name]
    words = [str(word) for word in random.choice(_words(), random.integers(1, 4))]
    if random.random() < 0.3:
        words.append(str(random.integers(10**5)))
    font = ImageFont.truetype(
        str(random.choice(np.array(list(map(str, fonts))))), int(random.integers(18, 31))
    )
    paper, ink = int(random.integers(200, 256)), int(random.integers(0, 70))
    image = Image.new("RGB", (width, height), (paper,) * 3)
    draw = ImageDraw.Draw(image)
    text = " ".join(words)
    _, _, right, bottom = draw.textbbox((0, 0), text, font=font)
    room = max(1, int(width - right - 8)), max(1, int(height - bottom - 4))
    at = 4 + int(random.integers(room[0])), 2 + int(random.integers(room[1]))
    draw.text(at, text, (ink,) * 3, font)
    noise = random.normal(0, float(random.uniform(0, 10)), (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


@cache
def _words() -> np.ndarray[Any, Any]:
    """English words, from Python's own help texts."""
    text = " ".join(topics.values())
    return np.array(sorted(set(re.findall(r"\b[A-Za-z]{3,10}\b", text))))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"rapidocr's {rows[0]['part']} ({rows[0]['file']})" if rows else "nothing")
    for heading in ("zeros", "way", "same text", "ours, ms", "onnxruntime, ms", "seconds"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{ms:.1f}" if ms else "" for ms in (row["ours_ms"], row["onnxruntime_ms"])]
        table.add_row(
            f"{row['share']:.0%}", row["way"], f"{row['same']:.1%}", *times, f"{row['seconds']:.0f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
