"""A virtual environment with one version of torch and aerogel from this checkout.

    python -m benchmarks.harness.torch_environment 2.8.0 --folder SCRATCH

pip downloads the wheel by its name and installs it without its dependencies; then come those that are neither
NVIDIA's nor triton, what aerogel depends on, and stand-ins for NVIDIA's libraries where the wheel is a CUDA
one. pip reports the missing packages as conflicts. The environment is SCRATCH/VERSION; it takes about three
gigabytes, and the wheel is deleted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks.harness.stand_ins import write_stand_ins

ROOT = Path(__file__).parents[2]
_SKIPPED = re.compile(r"(nvidia-|cuda-|triton|pytorch-triton)|.*extra ==")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def download_wheel(version: str, folder: Path) -> Path:
    """Download torch's wheel unless it is in `folder` already, and return its file."""
    if not list(folder.glob("torch-*.whl")):
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir",
            "--dest", folder, f"torch=={version}",
        )  # fmt: skip
    return next(folder.glob("torch-*.whl"))


def torch_requirements(python: Path) -> list[str]:
    """Return what the installed torch asks for, without GPU packages and extras."""
    script = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    return [line for line in json.loads(_run(python, "-c", script)) if not _SKIPPED.match(line)]


def own_requirements() -> list[str]:
    """Return what aerogel depends on besides torch, and onnx."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required: list[str] = project["dependencies"]
    return [
        *(line for line in required if not re.match(r"torch\b", line)),
        *project["optional-dependencies"]["onnx"],
    ]


def prepare(version: str, folder: Path) -> Path:
    """Make the environment of one version and return its Python. One that is complete stays as it is."""
    home = folder / version
    python, mark = home / "bin" / "python", home / "complete"
    if mark.exists():
        return python
    _run(sys.executable, "-m", "venv", "--clear", home)
    pip: tuple[str | Path, ...] = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    wheel = download_wheel(version, folder / "wheels" / version)
    _run(*pip, "--no-deps", wheel)
    wheel.unlink()
    _run(*pip, *torch_requirements(python), *own_requirements())
    _run(*pip, "--no-deps", "--editable", ROOT)
    script = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    package = Path(_run(python, "-c", script).strip())
    mark.write_text("\n".join(write_stand_ins(package)))
    return python


def main() -> None:
    """Run the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("version", help="a release of torch")
    parser.add_argument("--folder", type=Path, required=True, help="where environments are made")
    options = parser.parse_args()
    print(prepare(options.version, options.folder.resolve()))


if __name__ == "__main__":
    main()
