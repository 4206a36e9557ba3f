"""A backend that aerogel has never heard of goes through all of it; so does a method of one folder."""

from __future__ import annotations

import ast
import functools
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aerogel
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.codegen.cpu import llvm
from aerogel.ir import GRAPH, Target
from aerogel.methods import METHODS, cpu_form, gpu_form
from tests import counts
from tests.reference_backend import Reference, Timed
from tests.small_models import Small, right, sparse

PATTERNS = ("tilewise",)
"""A way to prune, too."""
SOURCE = counts.ROOT / "src" / "aerogel"


def test_a_third_backend(tmp_path: Path) -> None:
    """Compile, tune with injected times, explain, save and load run through it."""
    model, x = sparse(Small()), torch.randn(1, 3, 24, 24)
    backend = Reference({"dense": 30.0, "direct": 10.0})
    with using(backend):
        fast = aerogel.compile(model, x, store=tmp_path, progress=False)
    assert fast.backend is backend
    assert {choice.config.method for choice in fast.plan.choices} == {"direct"}
    assert fast.speedup == Reference.THEIRS / Reference.OURS
    before = backend.ran
    right(model, fast, torch.randn(2, 3, 32, 24))
    assert backend.ran == before + 1
    said = str(aerogel.explain(fast, verbose=True))
    assert "reference-float64" in said
    assert "10 us, dense 30 us (3.00x)" in said
    assert "the reference has no tilewise" in said
    aerogel.save(fast, tmp_path / "model.aero")
    with using(Reference({})):
        again = aerogel.load(tmp_path / "model.aero")
        assert torch.equal(again(x), fast(x))
        known = aerogel.compile(model, x, store=tmp_path, progress=False)
    assert any("from the store" in note for note in known.notes), "nothing is timed twice"
    elsewhere = aerogel.load(tmp_path / "model.aero")
    assert "saved on reference-float64, chosen by rule for" in str(aerogel.explain(elsewhere))
    right(model, elsewhere, x)


def test_what_loses_there_stays_torchs() -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 24, 24)
    with using(Reference({"dense": 10.0, "direct": 30.0})):
        fast = aerogel.compile(model, x, progress=False)
    assert {choice.config.method for choice in fast.plan.choices} == {"dense"}


class _HeldUp(Reference):
    """Other work holds ours up in two of the first rounds in which the whole model is timed."""

    whole = 0

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        us = super().clock(run, repeats)
        if us != self.OURS or isinstance(run, Timed):
            return us
        self.whole += 1
        return 10 * us if self.whole in (4, 5) else us


def test_a_busy_moment_does_not_cost_the_model() -> None:
    """A few rounds are enough where both the fastest and the rule say the same."""
    model, x = sparse(Small()), torch.randn(1, 3, 24, 24)
    backend = _HeldUp({"dense": 30.0, "direct": 15.0})
    with using(backend):
        fast = aerogel.compile(model, x, progress=False)
    assert backend.whole > 5
    assert fast.backend is backend
    assert fast.how == GRAPH


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_a_cpu_held_to_less_runs_nothing_else(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, build = set[str](), llvm.function

    def noting(code: str, entry: str, emit: Any, isa: str, extra: str = "") -> Any:
        made.add(isa)
        return build(code, entry, emit, isa, extra)

    monkeypatch.setattr(llvm, "function", noting)
    model, x = sparse(Small()), torch.randn(1, 3, 24, 24)
    with using(Cpu(Cpu().target.lower(isa))):
        fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert any(choice.config.method != "dense" for choice in fast.plan.choices)
    assert made == {isa}


def test_a_module_from_a_machine_that_can_do_more() -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 24, 24)
    fast = aerogel.compile(model, x, tune="off")
    fast.backend = Cpu(Target("neon"))
    right(model, pickle.loads(pickle.dumps(fast)), x)


_NEW = {
    "__init__.py": '''"""`twin`: direct under another name, to see what a method needs."""

from aerogel.methods.direct import DEMANDS, ROUNDING, SKIPS_INPUT, SUMMARY

NAME, PAPER, RANK = "twin", "no paper", 0
NOT_ON = {"gpu": "twin has no GPU form"}
''',
    "cpu.py": '''"""`twin` on CPUs."""

from dataclasses import replace

from aerogel.ir.config import Config
from aerogel.methods.direct import cpu as direct
from aerogel.methods.direct.cpu import layouts, refuse

NAME = "twin"


def configs(conv, target, stats):
    for config in direct.configs(conv, target, stats):
        yield Config(NAME, config.options)


def pack(weight, conv, config):
    return replace(direct.pack(weight, conv, config), format=NAME)


def check(packed, conv):
    direct.check(replace(packed, format="direct"), conv)


def unpack(packed, conv):
    return direct.unpack(replace(packed, format="direct"), conv)


def build(packed, conv, config, target, reads, writes, rows=None):
    return direct.build(replace(packed, format="direct"), conv, config, target, reads, writes, rows)


def pixels(*given):
    return direct.pixels(*given)
''',
}
_USED = """
import torch, aerogel
from aerogel.cli.main import app
from tests.small_models import Small, right, sparse
from tests.suite.sweep import sweep
from typer.testing import CliRunner

done = sweep("twin", "exact", range(20))
assert done.ran >= 20 and not done.failures, done
model, x = sparse(Small(), 0.95), torch.randn(1, 3, 24, 24)
fast = aerogel.compile(model, x, tune="off")
assert {c.config.method for c in fast.plan.choices} == {"twin", "dense"}, "the head has no zeros"
right(model, fast, x)
said = str(aerogel.explain(fast, verbose=True))
assert "twin" in said and "no paper" in said
timed = aerogel.compile(model, x, methods=("twin",), progress=False)
assert any(c.method == "twin" for choice in timed.plan.choices for c in choice.configs())
aerogel.save(fast, "model.aero")
again = aerogel.load("model.aero")
assert torch.equal(again(x), fast(x))
assert "twin" in CliRunner().invoke(app, ["methods"]).output
"""


def test_a_new_method_is_one_folder_and_one_name(tmp_path: Path) -> None:
    """Suite, tuner, explain, `aerogel methods`, save and load take it up without a change elsewhere."""
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(
            counts.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results", "*.pyc")
        )
    folder = tmp_path / "src" / "aerogel" / "methods"
    (folder / "twin").mkdir()
    for name, text in _NEW.items():
        (folder / "twin" / name).write_text(text)
    listed = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(listed.replace('"quads"', '"quads", "twin"'))
    path = os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", _USED]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]


@functools.cache
def _options() -> frozenset[str]:
    """Names of all options that a configuration of any method has."""
    found = set[str]()
    for path in (SOURCE / "methods").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "make"
            ):
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return frozenset(found)


def _reads(path: Path) -> list[str]:
    """Methods that a module names, and options of theirs that it reads."""
    found, options = [], _options()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in METHODS and node.value not in PATTERNS:
            found.append(f"line {node.lineno}: '{node.value}'")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("aerogel.methods."):
            found.append(f"line {node.lineno}: {node.module}")
        match node:
            case ast.Subscript(value=held, slice=ast.Constant(value=name)) if name in options:
                if ast.unparse(held).split(".")[-1] in ("config", "options"):
                    found.append(f"line {node.lineno}: option {name}")
    return found


def test_nothing_outside_methods_names_one_or_reads_its_options() -> None:
    assert {"vectors", "aligned", "channels_last"} <= _options()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        if room not in ("methods", "formats"):
            assert not (met := _reads(path)), f"{path.relative_to(SOURCE)}: {met}"


def test_every_method_has_both_forms() -> None:
    for name in METHODS:
        assert cpu_form(name).NAME == gpu_form(name).NAME == name
