"""The house rules that a machine can check: imports go down, torch stays in its rooms, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import aerogel
from aerogel.methods import METHODS, cpu_form, gpu_form, method

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "aerogel"
FLOORS = [
    ["cli"],
    ["report"],
    ["ray", "lightning", "huggingface"],
    ["serving"],
    ["saved", "pruning", "dynamo", "zoo"],
    ["compiler"],
    ["arguments"],
    ["tune"],
    ["runtime"],
    ["backends"],
    ["capture"],
    ["methods"],
    ["formats"],
    ["codegen"],
    ["reference"],
    ["preprocess"],
    ["ir"],
    ["progress", "addresses", "torch_versions"],
    ["optional", "outputs"],
    ["errors", "disk", "locks", "fileformats"],
]
PEERS = [("backends", "cpu", "gpu"), ("codegen", "cpu", "gpu"), ("methods", *METHODS)]
"""Folders of one room that know nothing of each other."""
TORCH_ROOMS = (
    "compiler.py", "arguments.py", "saved", "dynamo.py", "cli", "capture", "runtime", "backends", "pruning",
    "serving", "tune", "zoo", "ir/tensors.py", "methods/dense/cpu.py",
)  # fmt: skip


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
                assert there > here or same, (
                    f"{path.relative_to(SOURCE)} imports {name}, which is not below it"
                )


def test_peers_do_not_know_each_other() -> None:
    for room, *peers in PEERS:
        for peer in peers:
            others = tuple(f"aerogel.{room}.{other}" for other in peers if other != peer)
            for path in (SOURCE / room / peer).rglob("*.py"):
                met = [name for name in _imports(path) if name.startswith(others)]
                assert not met, f"{path.relative_to(SOURCE)} imports {met[0]}"


def _modules() -> dict[str, set[str]]:
    """Every module and those that it imports when it is imported itself."""
    names = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in SOURCE.rglob("*.py")
    }
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text())
        later = ast.FunctionDef | ast.ClassDef | ast.If  # an `if` at the top is for the type checker
        top = ast.Module([node for node in tree.body if not isinstance(node, later)], [])
        wanted = set[str]()
        for node in ast.walk(top):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted |= {full if full in names else node.module for full in whole}
        found[name] = wanted & names.keys() - {name}
    return found


def test_there_are_no_circles() -> None:
    left = _modules()
    while free := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_torch_stays_in_its_rooms() -> None:
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith(TORCH_ROOMS):
            assert not [n for n in _imports(path) if n.split(".")[0] == "torch"], place


def test_kernels_of_ours_need_no_torch() -> None:
    script = "import sys, aerogel.methods.direct.cpu; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_locks_are_ours() -> None:
    """Any other that a thread holds over a fork is held in the child for good (aerogel/locks.py). Python
    3.11's cached_property has one for each class."""
    for path in SOURCE.rglob("*.py"):
        if path.name != "locks.py":
            found = re.findall(
                r"threading\.(?:R?Lock|Condition|Semaphore)\b|cached_property", path.read_text()
            )
            assert not found, (path, found)


def test_files_stay_small() -> None:
    for path in [
        *SOURCE.rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]:
        assert len(path.read_text().splitlines()) <= 400, f"{path.name}: is there a second room in it?"


def test_every_method_has_the_shape_of_one() -> None:
    for name in METHODS:
        assert name == method(name).NAME == cpu_form(name).NAME == gpu_form(name).NAME
        assert all(
            hasattr(method(name), part)
            for part in ("PAPER", "SUMMARY", "SKIPS_INPUT", "RANK", "DEMANDS", "ROUNDING", "NOT_ON")
        )
        assert all(
            hasattr(cpu_form(name), part)
            for part in ("refuse", "configs", "pack", "unpack", "layouts", "build")
        )
        page = (SOURCE / "methods" / name / "__init__.py").read_text()
        assert page.startswith(f'"""`{name}`'), "its docstring opens with its name"


def test_public_names() -> None:
    assert len(aerogel.__all__) <= 26
    assert all(hasattr(aerogel, name) for name in aerogel.__all__)


def test_nothing_names_this_machine_or_a_registry() -> None:
    forbidden = re.compile(
        r"/root/|/work/|/home/\w+/|/opt/|https?://[^\s\"'>)]*(pypi|pythonhosted|debian)", re.IGNORECASE
    )
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".jsonl", ".json", "")
            and path.is_file()
            and path != Path(__file__)
        ):
            hit = forbidden.search(path.read_text(errors="replace"))
            assert hit is None, f"{name}: {hit and hit[0]}"


def test_every_folder_is_in_the_drawing() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    drawing = text[text.index("```") : text.index("```", text.index("```") + 3)]
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    named = {word for line in drawing.splitlines() for word in line.split() if word in folders or "/" in word}
    assert named == folders
