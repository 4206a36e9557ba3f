"""Runs one short test against sources with a fault in them, or many: the machinery of `tests.faults`.

    python -m tests.breaking
        serves: a fault's number and the words of its test come in as JSON lines, the outcome goes out

The server imports what is heavy (torch, LLVM, pytest) once and forks for each fault; nothing of ours is
imported before the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
# shared: its keys hold a digest of the code generator, broken or not
CACHE = ROOT / ".pytest_cache" / "aerogel"
HEAVY = (
    "numpy",
    "llvmlite.binding",
    "pytest",
    "hypothesis.strategies",
    "torch",
    "torch.export",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "safetensors.numpy",
    "onnx",
    "concurrent.futures",
)
OURS = ("aerogel", "tests", "benchmarks")
SECONDS = 300
"""A test of a fault may take so long; one that hangs has caught it."""


@contextmanager
def broken(file: str, find: str, put: str) -> Iterator[Path]:
    """A copy of the checkout in which `find`, which stands once in `file`, is `put`. Without a file nothing
    is changed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks"):
            # compiled Python goes along: its sources keep their times
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "benchmarks" / "results").mkdir()
        shutil.copy(ROOT / "benchmarks" / "results" / "gpu_simulated.json", copy / "benchmarks" / "results")
        if file:
            target = copy / "src" / "aerogel" / file
            text = target.read_text()
            assert text.count(find) == 1, f"{file}: '{find}' stands there {text.count(find)} times"
            target.write_text(text.replace(find, put))
            for old in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
                old.unlink()
        yield copy


def outcome(copy: Path, words: list[str]) -> dict[str, Any]:
    """`words` in a forked child: {"caught": how or "", "skipped": bool, "said": the end of its output,
    "failed": node ids, "traced": the case that ran last}."""
    log, failed = copy / "log", copy / "failed"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _run(copy, words, log, failed)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    status, deadline = None, time.monotonic() + SECONDS
    while status is None:
        done, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else None
        if status is None and time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.02)
    said = log.read_text(errors="replace") if log.exists() else ""
    named = failed.read_text().splitlines() if failed.exists() else []
    suite = words[0].startswith("tests.")
    caught = (
        f"signal {-status}"
        if status < 0
        else (named or [" ".join(words)])[0]
        if status == 1 or (suite and status)
        else ""
    )
    skipped = not suite and status == 0 and re.search(r"\d+ passed", said) is None
    traced = re.findall(r"^trace: (.*)$", said, re.MULTILINE)[-1:]
    return {"caught": caught, "skipped": skipped, "said": said[-4000:], "failed": named, "traced": traced}


def _run(copy: Path, words: list[str], log: Path, failed: Path) -> int:
    """In the child: nothing of this checkout is left on the path or among the modules."""
    os.setsid()
    os.chdir(copy)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        del sys.modules[name]
    own = (str(copy), str(copy / "src"))
    sys.path[:] = [*own, *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "src"))]
    importlib.invalidate_caches()
    os.environ.update(PYTHONPATH=os.pathsep.join(own), AEROGEL_CACHE=str(CACHE), OMP_NUM_THREADS="1")
    if words[0].startswith("tests."):
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return 0
    import pytest

    class Failed:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.write_text(report.nodeid + "\n")

    seed = [] if "--seed" in words else ["--seed", "0"]
    return int(
        pytest.main(
            ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", "--quick", *seed, *words],
            plugins=[Failed()],
        )
    )


def _export_once() -> None:
    """Import what torch only imports when it first exports."""
    import torch

    layer = torch.nn.Conv2d(1, 1, 1).eval()
    sizes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            layer, (torch.zeros(2, 1, 4, 4),), dynamic_shapes=(sizes,), strict=False
        )
        program.run_decompositions({})


def serve() -> None:
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    _export_once()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            with broken(asked["file"], asked["find"], asked["put"]) as copy:
                answer: dict[str, Any] = {}
                for words in asked["words"]:
                    answer = outcome(copy, words)
                    if answer["caught"] or answer["skipped"]:
                        break
        except AssertionError as why:
            answer = {"error": str(why)}
        print(json.dumps(answer), flush=True)


class Server:
    """A process that serves, started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, file: str, find: str, put: str, *words: list[str]) -> dict[str, Any]:
        """The outcome of the first of several tests that catches it, or of the last."""
        if self._process is None:
            own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
            # torch brings Triton in, which reads it once
            environment = os.environ | own | {"TRITON_INTERPRET": "1"}
            command = [sys.executable, "-m", "tests.breaking"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
            )
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        print(json.dumps({"file": file, "find": find, "put": put, "words": words}), file=given, flush=True)
        answer = _answer(taken)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        if self._process is not None:
            with self._process:  # closes both pipes and waits
                pass
            self._process = None


def _answer(taken: IO[str]) -> dict[str, Any]:
    line = taken.readline()
    assert line, "the server of faults is gone"
    return json.loads(line)  # type: ignore[no-any-return]


if __name__ == "__main__":
    serve()
