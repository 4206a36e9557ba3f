"""Tables and charts from result files: machines have names, the newest runs count, and anybody can rerun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.harness import chart, tables
from benchmarks.harness.machines import machine_name
from benchmarks.zoo import patterns

ROOT = Path(__file__).parent.parent
AMX = "cpu-avx512+amx_bf16+amx_int8+avx512bf16+avx512fp16+avx512vnni+f16c-l1:49152-l2:2097152-l3:314572800-t1"
OLDER_AMX = AMX.replace("+avx512vnni", "")
VNNI = "cpu-avx512+avx512vnni+f16c-l1:32768-l2:1048576-l3:37486592-t1"


def run(target: str, date: str, ms: dict[str, float], **more: Any) -> dict[str, Any]:
    """Return a line as benchmarks/run.py writes it."""
    ratio = {name: value / ms["aerogel"] for name, value in ms.items() if name != "aerogel"}
    return {
        "model": "resnet50", "pruning": "resnet50-90", "batch": 1, "threads": 1, "size": 224, "held": "",
        "dtype": "float32", "amx": "amx" in target, "target": target, "date": date, "torch": "2.13.0",
        "ms": {name: {"p50": value} for name, value in ms.items()}, "error": dict.fromkeys(ms, 1e-7),
        "ratio": ratio | {"fastest": min(ratio.values())},
    } | more  # fmt: skip


def test_a_machine_has_a_name_for_people() -> None:
    assert machine_name(AMX) == machine_name(OLDER_AMX) == "AVX-512 with AMX and FP16, L2 2 MB, L3 300 MB"
    assert machine_name(VNNI) == "AVX-512 with VNNI, L2 1 MB, L3 35.8 MB"


def test_the_chart_takes_the_newest_runs_of_each_machine() -> None:
    floats = [
        run(OLDER_AMX, "2026-01-01", {"aerogel": 30.0, "torch": 90.0}),
        run(OLDER_AMX, "2026-01-05", {"aerogel": 20.0, "torch": 90.0, "onnxruntime": 60.0}),
        run(VNNI, "2026-01-02", {"aerogel": 40.0, "torch": 120.0}),
        run(VNNI, "2026-01-09", {"aerogel": 1.0, "torch": 120.0}, held="AVX2 code on an AVX-512 CPU"),
    ]
    opponents = {"openvino-bf16": 12.0, "openvino-int8": 8.0, "aerogel-f32": 15.0}
    half = [run(t, "2026-01-06", {"aerogel": 10.0} | opponents, dtype="float16") for t in (AMX, VNNI)]
    bytes_ = [run(AMX, "2026-01-06", {"aerogel": 5.0, "openvino-int8": 8.0, "torch": 90.0}, dtype="int8")]
    bytes_[0]["pruning"] = "90% 1x4"
    panels = chart.numbers({"models": floats, "half": half, "int8_models": bytes_})
    assert list(panels) == [machine_name(AMX), machine_name(VNNI)], (
        "the machine with the newest results first"
    )
    first, second = panels.values()
    assert first == {
        "f32": {"dense f32, onnxruntime": (60.0, 1.0), "f32, 90 % zeros": (20.0, 3.0)},
        "16 bits": {"dense bf16, OpenVINO": (12.0, 1.0), "16 bits, 90 % zeros": (10.0, 1.2)},
        "int8": {"dense int8, OpenVINO": (8.0, 1.0), "int8, 90 %, blocks": (5.0, 1.6)},
    }
    assert list(second) == ["f32"], "dense bf16 is no opponent where nothing computes in it"


def test_tables_take_the_newest_day_and_a_table_for_each_machine() -> None:
    rows = [
        run(VNNI, "2026-01-01", {"aerogel": 30.0, "torch": 90.0, "inductor": 60.0}),
        run(VNNI, "2026-01-02", {"aerogel": 20.0, "torch": 90.0}),
        run(AMX, "2026-01-02", {"aerogel": 10.0, "torch": 90.0}),
    ]
    first, _, second = tables.models(rows).partition(machine_name(VNNI))
    assert "| resnet50 resnet50-90, 224 x 224 | 1 | 20.0 | 4.50x | 2.00x |" in first
    assert machine_name(AMX) in second
    text = tables.half([run(t, "2026-01-02", {"aerogel": 10.0, "torch-bf16": 90.0}) for t in (VNNI, AMX)])
    assert text.count("| aerogel | torch-bf16 |") == 2
    assert "with AMX | 10.0 (1e-07) |" in text.partition(machine_name(VNNI))[2]


@pytest.mark.parametrize("theme", chart.INKS)
def test_the_narrow_chart_is_legible_on_a_phone(theme: str) -> None:
    text = (chart.FOLDER / f"speed-{theme}-narrow.svg").read_text()
    (width,) = re.findall(r'<svg .*?width="([\d.]+)pt"', text, re.DOTALL)
    shrunk = min(1.0, 358 / (float(width) * 4 / 3))  # a phone of 390 pixels with 16 on each side
    sizes = [float(size) * 4 / 3 * shrunk for size in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes
    assert min(sizes) >= 10
    for page in ("README.md", "docs/index.md", "docs/benchmarks.md"):
        assert f"speed-{theme}-narrow.svg" in (ROOT / page).read_text()


def test_a_pattern_file_holds_the_zeros_of_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def network() -> tuple[nn.Sequential, nn.Conv2d, nn.Conv2d]:
        first, last = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 5, 1)
        return nn.Sequential(first, nn.Conv2d(8, 8, 3, groups=8), last), first, last

    (model, stem, head), (other, _, others_head) = network(), network()
    stem.weight.data *= torch.rand(8, 3, 3, 3) > 0.9
    head.weight.data *= torch.rand(5, 8, 1, 1) > 0.5
    patterns.save(model, ((torch.randn(1, 3, 20, 22),), {}), tmp_path / "mine.npz")
    first, last = patterns.load(tmp_path / "mine.npz")
    assert str(first.conv).startswith("n1c3h20w22k8r3s3u2p1")
    assert str(last.conv).startswith("n1c8h8w9k5r1s1u1p0")
    assert np.array_equal(first.mask, stem.weight.detach().numpy() != 0)
    patterns.prune_pattern(other, tmp_path / "mine.npz")
    assert torch.equal(others_head.weight != 0, head.weight != 0)


def test_commands_for_visitors_need_no_files_of_ours() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "../shared" not in page
    assert "python -m benchmarks.zoo.patterns" in page.partition("--pattern resnet50")[0], (
        "where masks come from"
    )
    for after in page.split("Rerun:\n")[1:]:
        first = after.split("```")[1].splitlines()[1]
        assert "--sparsity" in first, f"the first form works for everybody, not {first}"


def test_no_table_shows_a_fingerprint() -> None:
    for page in tables.PAGES:
        if page.name != "gpu.md":
            assert not re.search(r"cpu-avx\w+\+", page.read_text()), (
                f"{page.name}: name_machines says it in words"
            )
