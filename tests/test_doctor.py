"""`aerogel doctor`: each thing that may be wrong is made so, found, and has its remedy said."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from aerogel.backends.cpu import cores as allowed
from aerogel.backends.cpu.cores import cpu_quota
from aerogel.cli import doctor
from aerogel.cli.surroundings import false_triton, unsafe, written


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = {"quota": "cpu.cfs_quota_us", "period": "cpu.cfs_period_us"}


@pytest.mark.parametrize(
    ("files", "process", "wanted"),
    [
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "150000 100000"}, "", 1.5),
        (
            {"cpu.max": "max 100000", "a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"},
            "0::/a/b",
            0.5,
        ),
        (
            {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"},
            "0::/a/b",
            2.0,
        ),
        ({"a/cpu.max": "200000 100000", "c/cpu.max": "100000 100000"}, "0::/a", 2.0),
        ({"a/cpu.max": "200000 100000"}, "0::/../a", 2.0),
        ({f"cpu/{V1['quota']}": "200000", f"cpu/{V1['period']}": "100000"}, "1:cpu:/", 2.0),
        ({f"cpu/{V1['quota']}": "-1", f"cpu/{V1['period']}": "100000"}, "1:cpu:/", None),
        (
            {f"cpu,cpuacct/g/{V1['quota']}": "300000", f"cpu,cpuacct/g/{V1['period']}": "100000"},
            "4:cpu,cpuacct:/g",
            3.0,
        ),
        (
            {f"cpu/g/{V1['quota']}": "300000", f"cpu/g/{V1['period']}": "100000"},
            "4:cpu,cpuacct:/g\n5:memory:/h",
            3.0,
        ),
        (
            {f"cpu/h/{V1['quota']}": "300000", f"cpu/h/{V1['period']}": "100000"},
            "4:cpu,cpuacct:/g\n5:memory:/h",
            None,
        ),
        ({}, "0::/", None),
        ({"cpu.max": "rubbish"}, "rubbish", None),
        ({"cpu.max": "1 0"}, "0::/", None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], process: str, wanted: float | None) -> None:
    make(tmp_path / "root", files)
    (tmp_path / "process").write_text(process)
    assert cpu_quota(tmp_path / "root", tmp_path / "process") == wanted
    assert cpu_quota(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("threads", "cores", "quota", "variable", "good", "says"),
    [
        (
            4,
            8,
            None,
            None,
            True,
            "torch uses 4 threads, this process may run on 8 cores, no cgroup CPU quota",
        ),
        (8, 4, None, None, True, "nobody has set a number, so aerogel takes 4"),
        (8, 8, 2.5, None, True, "quota is 2.5 cores: nobody has set a number, so aerogel takes 2"),
        (
            6,
            4,
            None,
            None,
            False,
            "say --threads 4, set OMP_NUM_THREADS=4, or in Python torch.set_num_threads(4)",
        ),
        (6, 8, 2.5, None, False, "quota is 2.5 cores: too many threads wait for each other; say --threads 2"),
        (2, 8, 0.5, None, False, "say --threads 1"),
        (1, 8, 0.5, None, True, "quota is 0.5 cores"),
        (8, 4, None, "8", False, "OMP_NUM_THREADS is 8: too many"),
        (1, 8, None, "1", True, "7 cores are left alone because OMP_NUM_THREADS asks for it"),
        (4, 8, None, "many", False, "OMP_NUM_THREADS is many, which is no number"),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    cores: int,
    quota: float | None,
    variable: str | None,
    good: bool,
    says: str,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(allowed, "cores", lambda: cores)
    monkeypatch.setattr(allowed, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in allowed.ASKED:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    found = doctor._threads()
    assert found.good == good
    assert says in found.says


def private(tmp_path: Path) -> Path:
    """A folder under others that are safe: pytest's own are 0700, below /tmp."""
    (tmp_path / "own").mkdir(mode=0o700)
    return tmp_path / "own"


def test_the_cache_folder_is_written_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = private(tmp_path) / "deep" / "cache"
    monkeypatch.setenv("AEROGEL_CACHE", str(folder))
    found = doctor._folder()
    assert found.good, found.says
    assert found.says == f"{folder}: 0 compiled kernels, 0 tuning records"
    assert [p.name for p in folder.rglob("*")] == ["objects"], "nothing is left behind"
    assert folder.stat().st_mode & 0o777 == 0o700, "private, as the library makes it"
    make(folder, {"objects/a.o": "", "tuning/x/b.json": "", "tuning/c.json": ""})
    assert "1 compiled kernels, 2 tuning records" in doctor._folder().says


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"file": ""})
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "file"))
    found = doctor._folder()
    assert not found.good
    assert "cannot be written (" in found.says
    assert "Set AEROGEL_CACHE to a folder of yours" in found.says


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Access says yes; only writing tells."""
    monkeypatch.setenv("AEROGEL_CACHE", str(private(tmp_path)))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    found = doctor._folder()
    assert not found.good
    assert "(No space left on device)" in found.says
    assert not list((tmp_path / "own" / "objects").iterdir())


def test_a_link_in_the_place_of_the_probe(tmp_path: Path) -> None:
    make(tmp_path, {"victim": "whole"})
    (tmp_path / f".doctor.{os.getpid()}").symlink_to(tmp_path / "victim")
    assert isinstance(written(tmp_path), FileExistsError)
    assert (tmp_path / "victim").read_text() == "whole"


def test_folders_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private(tmp_path) / "above" / "cache"
    (folder / "objects").mkdir(parents=True, mode=0o700)
    for place, mode in (
        (folder / "objects", 0o770),
        (folder, 0o702),
        (folder.parent, 0o777),
        (folder.parent, 0o1777),
    ):
        place.chmod(mode)
        monkeypatch.setenv("AEROGEL_CACHE", str(folder))
        found = doctor._folder()
        sticky = mode & 0o1000 and os.getuid() == 0  # root's own sticky folders are as safe as /tmp
        assert found.good == bool(sticky), (place, found.says)
        assert sticky or f"chmod go-w '{place}'" in found.says
        place.chmod(0o700)
    assert unsafe(folder / "objects") is None
    link = tmp_path / "own" / "link"
    link.symlink_to(folder)
    folder.parent.chmod(0o777)
    assert "above" in (unsafe(link / "objects") or ""), "where it leads is what counts"


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = private(tmp_path)
    os.chown(folder, 4321, -1)
    said = unsafe(folder, 1234)
    assert said is not None
    assert "belongs to user 4321: set AEROGEL_CACHE" in said


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(doctor, "cache_folder", nobody)
    found = doctor._folder()
    assert not found.good
    assert "home folder is not known (Could not determine home directory.)" in found.says
    assert "Set AEROGEL_CACHE" in found.says


REAL = {f"triton/{part}/__init__.py": "" for part in ("compiler", "language", "runtime")} | {
    "triton/__init__.py": ""
}


def test_a_folder_called_triton(tmp_path: Path) -> None:
    real, empty, script, file = (str(tmp_path / name) for name in ("real", "empty", "script", "file"))
    make(tmp_path / "real", REAL)
    make(tmp_path / "empty", {"triton/config.pbtxt": ""})
    make(tmp_path / "script", {"triton/__init__.py": ""})
    make(tmp_path / "file", {"triton.py": ""})
    assert false_triton([]) is None
    assert false_triton([real, script]) is None
    assert false_triton([empty, real]) is None, "a package is taken before a folder without __init__.py"
    assert false_triton([empty]) == tmp_path / "empty" / "triton"
    assert false_triton([script, real]) == tmp_path / "script" / "triton"
    assert false_triton([file, real]) == tmp_path / "file" / "triton.py"


def test_triton_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "work", {"triton/__init__.py": ""})
    make(tmp_path / "site", REAL)
    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path / "bare")
    assert doctor._triton() == doctor.Finding("triton", str(tmp_path / "site" / "triton"))
    monkeypatch.chdir(tmp_path / "work")
    found = doctor._triton()
    assert not found.good
    assert found.says.startswith(
        f"Python started in this folder takes '{tmp_path / 'work' / 'triton'}' for the triton package"
    )
    assert "rename it" in found.says
    monkeypatch.setattr(sys, "path", [str(tmp_path / "work"), str(tmp_path / "site")])
    assert doctor._triton().says.startswith("Python takes '")
    monkeypatch.chdir(tmp_path / "bare")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "bare")])
    assert "not installed" in doctor._triton().says
