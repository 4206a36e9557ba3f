"""The sheet of single files: what is written, and what is made of what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aerogel.ir import Conv
from benchmarks.experiments.sim import sheet

PROGRAM = """#!/bin/sh
[ "$1" = -std=c++11 ] || exit 9
while [ "$1" != -o ]; do shift; done
case "$3" in *broken*) exit 1;; esac
printf '#!/bin/sh\\n%s\\n' "$(cat "$3")" > "$2" && chmod +x "$2"
"""


def test_programs_are_built_run_and_judged(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(PROGRAM)
    nvcc.chmod(0o700)
    said = {
        "A-crop-dense": "echo 'largest error 1e-07 of the sums size, 12.6 us'",
        "A-crop-direct": "echo 'largest error 0.5 of the sums size, 9.2 us'; exit 1",
        "A-crop-baked": "echo 'gpu_tot_sim_cycle = 7'; echo 'gpu_tot_sim_cycle = 20828'; echo ', 1 us'",
        "A-whole-dense": "exit 1",
        "A-whole-broken": "",
    }
    for name, text in said.items():
        (tmp_path / f"{name}.cu").write_text(text)
    assert sheet.run(tmp_path, str(nvcc), "sm_75", []) == {
        "A-crop-baked": "20,828 cycles",
        "A-crop-dense": "13 us",
        "A-crop-direct": "9 us, WRONG",
        "A-whole-broken": "does not compile",
        "A-whole-dense": "no answer",
    }


@pytest.mark.parametrize("form", sheet.FORMS)
def test_every_form_is_written_with_its_check(form: str) -> None:
    conv = Conv.parse("n1c32h8w24k64r3s3u1p1+bias+relu")
    weight = np.where(np.random.default_rng(0).random(conv.weight_shape) < 0.1, 1, 0).astype(np.float32)
    text = sheet.source(conv, weight, form) or ""
    assert "int main()" in text
    assert "largest error" in text
    if form == "stridepack-old":
        assert "#define TILE_P 4\n" in text
