"""The five-minute test: a fresh environment, the wheel, README's example, its report; then every verb as a
user would call it. Nothing of the checkout is on the path."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

(wheel,) = Path(sys.argv[1]).absolute().glob("aerogel-*.whl")
readme = (Path(__file__).parents[1] / "README.md").read_text()
(example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
began = time.monotonic()
last = began


def step(what: str) -> None:
    """Say how long that took."""
    global last
    now = time.monotonic()
    print(f"{what}: {now - last:.0f} s", flush=True)
    last = now


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = clean | {"AEROGEL_CACHE": str(folder / "cache")}
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python, aerogel = folder / "env" / "bin" / "python", folder / "env" / "bin" / "aerogel"

    def run(*words: object, code: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode in code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "torch==2.13.0")
    run(*pip, f"{wheel}[plot]")
    step("install")
    print(run(python, "-c", example))
    assert (folder / "report.html").stat().st_size > 10_000
    step("README's example and report.html")
    print(f"a first result after {time.monotonic() - began:.0f} s, downloads included; 300 s are promised")

    build = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU())\n"
    (folder / "mymodel.py").write_text(build)
    model = ("mymodel:build", "--shape", "x=1x3x40x40", "--tune", "off")
    for words in (
        ("--version",),
        ("methods",),
        ("compile", *model, "-o", "m.aero"),
        ("explain", "m.aero"),
        ("warm", "m.aero"),
        ("store", "ls"),
        ("report", "m.aero", "-o", "again.html"),
        ("bench", *model, "--sparsity", "0.9", "--rounds", "3", "--plot", "bench.png"),
        ("bench", "--zoo", "squeezenet", "--sparsity", "0.9", "--rounds", "2", "--tune", "off"),
        ("--show-completion", "bash"),
    ):
        said = run(aerogel, *words)
        assert said, words
        print(said)
    run(*pip, f"{wheel}[ray]")
    photos = "import os; from PIL import Image; os.mkdir('photos')\n"
    photos += "for i in range(5): Image.new('RGB', (60, 50), (i, 0, 9)).save(f'photos/{i}.png')"
    run(python, "-c", photos)
    for words in (
        ("compile", *model, "-o", "seen.aero", "--preprocess", "resize=44 crop=40 mean=0.5,0.5,0.5"),
        ("batch", "seen.aero", "--input", "photos", "--output", "results"),
        ("serve", "seen.aero", "-o", "serve.yaml"),
        ("export", "seen.aero", "--format", "triton", "-o", "models"),
    ):
        print(run(aerogel, *words))
    step("Ray")
    print(run(aerogel, "doctor", code=(0, 1)))
    dialect = "from aerogel.codegen.gpu.launch import dialect; assert 'KERNEL' in dialect()"
    run(python, "-I", "-c", dialect)
    package = Path(run(python, "-I", "-c", "import aerogel; print(aerogel.__path__[0])").strip())
    files = [p for p in package.rglob("*") if p.suffix in (".so", ".c")]
    assert not files, f"the wheel is pure Python, but holds {files}"
    step("every verb")
