"""Files that are quantised already, beside onnxruntime: layer by layer, and what whole networks read.

    python -m benchmarks.experiments.quantized_files --json benchmarks/results/quantized_files.json
    python -m benchmarks.experiments.quantized_files --only reader-QDQ --lines 20

rapidocr's reader and detector are quantised by onnxruntime's `quantize_static` (a scale for each filter,
rendered lines as calibration), ddddocr's `common_old.onnx` came quantised (dynamically; `--ddddocr` names its
folder). A layer is what stands between two maps of integers: each is compiled as a file of its own and given
the very integers that onnxruntime has there. `integers` are layers that our kernels run as integers. `apart`
is the share of their outputs that are not the same integer, `worst` that of the worst layer, `most` how far.
Lines are rendered as in slim_ocr.py; `same` is the share whose text is the same in onnxruntime and here.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx
import torch

import aerogel
from aerogel.capture.foreign import exact
from aerogel.ir.target import host
from benchmarks.experiments.slim_ocr import KEYS, NAMES, PAGES, SHAPES, rendered
from benchmarks.harness.layerwise import compared

FILES = {
    "reader-QDQ": ("reader", "QDQ", "QUInt8"),
    "reader-QOperator": ("reader", "QOperator", "QUInt8"),
    "detector-QDQ": ("detector", "QDQ", "QInt8"),
}
LINES, CALIBRATED = 300, 8
OPSET = 17
"""The first that knows a scale for each filter is 13; rapidocr's files are older."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one of the files: " + ", ".join((*FILES, "ddddocr")))
    parser.add_argument("--ddddocr", type=Path, help="where the package ddddocr was unpacked")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--json", type=Path, help="results; what is in it already is not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    names = [*FILES, *(["ddddocr"] if given.ddddocr else [])]
    for name in [given.only] if given.only else names:
        if any(row["file"] == name for row in found):
            continue
        row = dynamic(given.ddddocr, given.lines) if name == "ddddocr" else static(name, given.lines)
        found.append({"file": name, **row, "target": str(host()), "date": date.today().isoformat()})
        print(json.dumps(found[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


def static(name: str, lines: int) -> dict[str, Any]:
    """A file of rapidocr's, quantised here."""
    part, form, kind = FILES[name]
    path = quantized(part, form, kind, Path(mkdtemp()) / f"{name}.onnx")
    shape = (1, *SHAPES[part][1:])
    random = np.random.default_rng(4)
    row = compared(path, pixels(rendered(random, *shape[2:]))[None], ("QuantizeLinear", "QLinear", "QGemm"))
    fast = aerogel.compile(path, shapes={row.pop("input"): shape}, tune="off")
    random = np.random.default_rng(2)
    pages = [np.asarray(rendered(random, *PAGES[part])) for _ in range(lines)]
    theirs, ours = read(part, path, pages, None), read(part, path, pages, fast)
    same = sum(a == b for a, b in zip(theirs, ours, strict=True)) / lines
    return {**row, "lines": lines, "same": same, "empty": theirs.count("") / lines, "how": str(fast.how)}


def dynamic(folder: Path, lines: int) -> dict[str, Any]:
    """ddddocr's, whose scales are those of each map as it comes: what it reads is the likeliest sign of each
    step."""
    import onnxruntime

    path = folder / "ddddocr" / "common_old.onnx"
    random = np.random.default_rng(2)
    pages = [grey(rendered(random, 64, 320)) for _ in range(lines)]
    row = compared(path, pages[0], ("ConvInteger",))
    name = row.pop("input")
    fast = aerogel.compile(path, shapes={name: pages[0].shape}, tune="off")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = exact(str(path), options)
    both = [[signs(m.run(None, {name: x})[0]) for m in (session, fast)] for x in pages]
    same = sum(a == b for a, b in both) / lines
    return {**row, "lines": lines, "same": same, "empty": 0.0, "how": str(fast.how)}


def signs(steps: Any) -> list[int]:
    """The likeliest sign of each step, without repeats and blanks."""
    best = np.asarray(steps).reshape(-1, np.shape(steps)[-1]).argmax(-1)
    return [int(b) for b, before in zip(best, [-1, *best[:-1]], strict=True) if b not in (before, 0)]


def pixels(image: Any) -> Any:
    """As rapidocr prepares them."""
    return np.asarray(image, np.float32)[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - np.float32(1)


def grey(image: Any) -> Any:
    """As ddddocr prepares them."""
    return np.asarray(image.convert("L"), np.float32)[None, None] / np.float32(255)


def quantized(part: str, form: str, kind: str, out: Path) -> Path:
    """One of rapidocr's files through onnxruntime's own preparation and quantize_static."""
    from onnx import version_converter
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    origin = find_spec("rapidocr")
    assert origin is not None
    assert origin.origin is not None
    (path,) = (Path(origin.origin).parent / "models").glob(NAMES[part])
    before, prepared = onnx.load(path), out.with_suffix(".prepared.onnx")
    onnx.save(version_converter.convert_version(before, OPSET), prepared)
    quant_pre_process(str(prepared), str(prepared), skip_symbolic_shape=True)
    random = np.random.default_rng(1)
    batch, _, height, width = SHAPES[part]
    images = iter(
        np.stack([pixels(rendered(random, height, width)) for _ in range(batch)]) for _ in range(CALIBRATED)
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            image = next(images, None)
            return None if image is None else {before.graph.input[0].name: image}

    quantize_static(
        str(prepared), str(out), Reader(), quant_format=QuantFormat[form], per_channel=True,
        weight_type=QuantType.QInt8, activation_type=QuantType[kind],
    )  # fmt: skip
    made = onnx.load(out)
    made.metadata_props.extend(before.metadata_props)  # the reader's signs
    onnx.save(made, out)
    return out


class Ours:
    """A compiled file where rapidocr has its session."""

    def __init__(self, fast: Any) -> None:
        self.fast = fast

    def __call__(self, pixels: Any) -> Any:
        return self.fast.run(None, {self.fast.input_names[0]: pixels})[0]


def read(part: str, path: Path, pages: list[Any], fast: Any) -> list[str]:
    """What rapidocr reads on each page with this file in the place of its own, run by onnxruntime or here."""
    from rapidocr import RapidOCR

    params = {
        KEYS[part]: str(path),
        "Global.use_cls": False,
        "Global.use_det": part == "detector",
        "Global.log_level": "error",
        "Det.limit_type": "max",
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
    }
    engine: Any = RapidOCR(params=params)
    if fast is not None:
        engine(pages[0])  # parts are made when they are first used
        (engine.text_det if part == "detector" else engine.text_rec).session = Ours(fast)
    return [" ".join(engine(page).txts or ()) for page in pages]


if __name__ == "__main__":
    main()
