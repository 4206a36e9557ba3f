"""Stand-ins for the NVIDIA libraries that a CUDA build of torch is linked with.

    python -m benchmarks.harness.stand_ins SITE_PACKAGES/torch

A CUDA wheel without its NVIDIA packages (several gigabytes) does not import: the loader misses shared
libraries. Each missing one is made here as a small library with the symbols that torch asks of it, next to
torch's own. Every function returns "no device", so torch.cuda.is_available() is False. Needs `readelf` and a
C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE
DATA_LONGS = 512  # room for a data symbol whose size only the real library knows


@dataclass(frozen=True)
class Symbol:
    """One dynamic symbol of a shared object; `version` is empty where it has none."""

    name: str
    version: str
    is_data: bool
    is_defined: bool
    is_weak: bool


@dataclass
class StandIn:
    """What one missing library must have: symbols, and versions even without symbols."""

    symbols: dict[str, Symbol] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)


def _readelf(option: str, file: Path) -> list[str]:
    command = ["readelf", option, "-W", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed_libraries(file: Path) -> list[str]:
    """Return the libraries that a shared object names."""
    matches = (re.search(r"\(NEEDED\).*\[(.*)\]", line) for line in _readelf("-d", file))
    return [match[1] for match in matches if match]


def needed_versions(file: Path) -> dict[str, str]:
    """Return the symbol versions that a shared object asks for, each with the library it expects it in."""
    libraries, library = dict[str, str](), ""
    for line in _readelf("-V", file):
        if match := re.search(r"Version: \d+\s+File: (\S+)", line):
            library = match[1]
        elif (match := re.search(r"Name: (\S+)\s+Flags:", line)) and library:
            libraries[match[1]] = library
    return libraries


def dynamic_symbols(file: Path) -> list[Symbol]:
    """Return the dynamic symbols of a shared object."""
    symbols = []
    for line in _readelf("--dyn-syms", file):
        words = line.split()  # number, value, size, type, binding, visibility, section, name, ...
        if len(words) >= 8 and words[0].rstrip(":").isdigit():
            name, _, version = words[7].partition("@")
            symbol = Symbol(
                name, version.lstrip("@"), words[3] == "OBJECT", words[6] != "UND", words[4] == "WEAK"
            )
            symbols.append(symbol)
    return symbols


def _open_library(name: str) -> ctypes.CDLL | None:
    """Open a library of the system, or return None where there is none."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def missing_libraries(package: Path) -> dict[str, StandIn]:
    """Return what torch's shared objects need and neither torch nor the system has.

    A symbol with a version belongs to the library of that version. One without, that no library of the system
    has either, may be in any missing library of the same object: the loader looks for it in all of them.
    """
    objects = sorted({*(package / "lib").glob("*.so*"), *package.glob("_C*.so")})
    present = {file.name for file in objects}
    symbols = {file: dynamic_symbols(file) for file in objects}
    defined = {symbol.name for several in symbols.values() for symbol in several if symbol.is_defined}
    opened: dict[str, ctypes.CDLL | None] = {}
    stand_ins: dict[str, StandIn] = defaultdict(StandIn)
    for file in objects:
        libraries = [name for name in needed_libraries(file) if name not in present]
        for name in libraries:
            if name not in opened:
                opened[name] = _open_library(name)
        missing = [name for name in libraries if opened[name] is None]
        for name in missing:
            stand_ins[name]  # also one without a symbol is needed
        places = needed_versions(file)
        for version, library in places.items():
            if library in missing:
                stand_ins[library].versions.add(version)
        for symbol in symbols[file]:
            if symbol.is_defined or symbol.name in defined or re.match("_?Py", symbol.name):
                continue
            if symbol.version:
                if places.get(symbol.version) in missing:
                    stand_ins[places[symbol.version]].symbols[symbol.name] = symbol
            elif missing and not symbol.is_weak and not any(hasattr(o, symbol.name) for o in opened.values()):
                stand_ins[missing[0]].symbols[symbol.name] = symbol
    return dict(stand_ins)


def write_library(stand_in: StandIn, file: Path) -> None:
    """Compile a stand-in to a shared library."""
    lines = [f"#define FUNCTION(name) long name(void) {{ return {NO_DEVICE}; }}"]
    lines += [
        f"long {symbol.name}[{DATA_LONGS}];" if symbol.is_data else f"FUNCTION({symbol.name})"
        for symbol in stand_in.symbols.values()
    ]
    by_version: dict[str, list[str]] = {version: [] for version in sorted(stand_in.versions)}
    for symbol in stand_in.symbols.values():
        if symbol.version:
            by_version.setdefault(symbol.version, []).append(symbol.name)
    source, script = (file.with_name(file.name + suffix) for suffix in (".c", ".map"))
    source.write_text("\n".join(lines) + "\n")
    nodes = [
        f"{version} {{ {'global: ' + '; '.join(names) + ';' if names else ''} }};"
        for version, names in by_version.items()
    ]
    script.write_text("\n".join(nodes) + "\n")
    command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(file), str(source)]
    command += [f"-Wl,-soname,{file.name}"] + ([f"-Wl,--version-script={script}"] if nodes else [])
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink()


def write_stand_ins(package: Path) -> list[str]:
    """Write a stand-in for each missing library into torch's folder of libraries; return their names."""
    missing = missing_libraries(package)
    for name, stand_in in missing.items():
        write_library(stand_in, package / "lib" / name)
    return sorted(missing)


def main() -> None:
    """Run the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("package", type=Path, help="the folder of the installed torch package")
    for name in write_stand_ins(parser.parse_args().package):
        print(name)


if __name__ == "__main__":
    main()
