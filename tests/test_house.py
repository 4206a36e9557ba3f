"""The house rules that a machine can check: imports go down, torch stays in its rooms, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import aerogel
from aerogel.methods import METHODS, method

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "aerogel"
FLOORS = [
    ["cli", "serve"],
    ["report"],
    ["saved", "dynamo", "advice", "repruning", "boosting"],
    ["compiler"],
    ["tune"],
    ["runtime", "pruning"],
    ["capture"],
    ["methods"],
    ["codegen"],
    ["plan"],
    ["candidate", "graph", "reference"],
    ["layout", "target"],
    ["problem"],
    ["errors", "disk"],
]
TORCH_ROOMS = (
    "saved.py",
    "dynamo.py",
    "advice.py",
    "repruning.py",
    "boosting.py",
    "cli",
    "capture",
    "runtime",
    "pruning",
    "methods/dense.py",
)


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def _floor(room: str) -> int | None:
    return next((i for i, floor in enumerate(FLOORS) if room in floor), None)


def test_imports_go_down_only() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        here = _floor(room)
        if room == "__init__":
            continue
        assert here is not None, f"{path.name} is in no floor of the house"
        for name in _imports(path):
            if name.startswith("aerogel.") and (there := _floor(name.split(".")[1])) is not None:
                same = name.split(".")[1] == room
                assert there > here or same, f"{path.relative_to(SOURCE)} imports {name}, which is not below it"


def test_methods_do_not_know_each_other() -> None:
    for path in (SOURCE / "methods").glob("*.py"):
        if path.stem != "__init__":
            assert not [n for n in _imports(path) if n.startswith("aerogel.methods.")], path.name


def test_torch_stays_in_its_rooms() -> None:
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith(TORCH_ROOMS):
            assert not [n for n in _imports(path) if n.split(".")[0] == "torch"], place


def test_kernels_of_ours_need_no_torch() -> None:
    script = "import sys, aerogel.methods.direct; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_files_stay_small() -> None:
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, f"{path.name}: is there a second room in it?"


def test_every_method_has_the_shape_of_one() -> None:
    for name in METHODS:
        module = method(name)
        assert name == module.NAME
        assert all(
            hasattr(module, part) for part in ("PAPER", "SUMMARY", "refuse", "configs", "pack", "unpack", "layouts", "build")
        )
        assert (SOURCE / "methods" / f"{name}.py").read_text().startswith(f'"""`{name}`'), "its docstring opens with its name"


def test_public_names() -> None:
    assert len(aerogel.__all__) <= 20
    assert all(hasattr(aerogel, name) for name in aerogel.__all__)


def test_nothing_names_this_machine_or_a_registry() -> None:
    forbidden = re.compile(r"/root/|/work/|/home/\w+/|/opt/|https?://[^\s\"'>)]*(pypi|pythonhosted|debian)", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".jsonl", ".json", "") and path.is_file() and path != Path(__file__):
            hit = forbidden.search(path.read_text(errors="replace"))
            assert hit is None, f"{name}: {hit and hit[0]}"
