"""Install the wheel beside the dependencies that are already here, without the checkout on the path, and use
it as a user would."""

import subprocess
import sys
import tempfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("aerogel-*.whl")
with tempfile.TemporaryDirectory() as folder:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        folder,
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    run = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {folder!r}); from aerogel.cli.main import app; app()",
    ]
    for verb in ("methods", "doctor", "--version"):
        done = subprocess.run([*run, verb], cwd=folder, capture_output=True, text=True)
        assert done.returncode in (0, 1) and done.stdout, f"{verb}: {done.stderr}"
        print(done.stdout)
    build = (
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), "
        "nn.Conv2d(32, 32, 3))\n"
    )
    (Path(folder) / "mymodel.py").write_text(build)
    shape = ("--shape", "x=1x3x40x40", "--tune", "off")
    for words in (
        ("compile", "mymodel:build", "-o", "m.aero", *shape),
        ("explain", "m.aero"),
        ("bench", "mymodel:build", "--sparsity", "0.9", "--rounds", "3", *shape),
    ):
        done = subprocess.run([*run, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, f"{words}: {done.stderr}"
        print(done.stdout)
    gpu = (
        f"import sys; sys.path.insert(0, {folder!r}); from aerogel.codegen.gpu.launch import dialect; "
        "assert 'KERNEL' in dialect()"
    )
    subprocess.run([sys.executable, "-I", "-c", gpu], cwd=folder, check=True)
    files = [p for p in Path(folder).rglob("*") if p.suffix in (".so", ".c")]
    assert not files, f"the wheel is pure Python, but holds {files}"
