"""Test runs keep compiled kernels in the checkout, never in the user's own cache; the network is out of
reach.

What a run takes (counts, seeds, parts) is said in counts.py and nightly.py; here are the options. What a test
draws at random follows from the seed and its name alone (randomness.py).
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import counts, nightly, randomness

os.environ.setdefault("AEROGEL_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "aerogel"))


HIDDEN = {
    "reorder": ("torch._C._nn", "mkldnn_reorder_conv2d_weight"),
    "fused": ("torch.ops.mkldnn", "_convolution_pointwise"),
    "onednn": ("torch._C", "_has_mkldnn"),
    "profiler": ("torch.autograd", "_profiler_enabled"),
}
"""What of torch is private and yet used, each with a fallback: `pytest --hide NAME` runs every test without
it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a fiftieth of the counts, to see a change work")
    parser.addoption("--hide", choices=sorted(HIDDEN), help="run without this private part of torch")
    parser.addoption("--nightly", action="store_true", help="the full counts; writes down what was run")
    parser.addoption(
        "--part",
        type=nightly.fraction,
        default=(1, 1),
        metavar="K/N",
        help="with --nightly: the K-th of N parts",
    )
    parser.addoption("--seed", type=int, help="of all random cases (default: tests/seeds.json)")


TALLY = pytest.StashKey[nightly.Tally]()
COMMIT = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {})  # in a worker of xdist: what the controller found
    commit = given.get("commit") or counts.commit()
    asked = given.get("seed", config.getoption("--seed"))
    mode = "nightly" if config.getoption("--nightly") else "quick" if config.getoption("--quick") else "ci"
    if config.getoption("--part") != (1, 1) and mode != "nightly":
        raise pytest.UsageError("--part goes with --nightly")
    counts.choose(mode, counts.default_seed(mode, commit) if asked is None else asked)
    config.stash[COMMIT] = commit
    _configure_hypothesis(config)
    if not hasattr(config, "workerinput"):
        config.stash[TALLY] = nightly.Tally()
        config.pluginmanager.register(Watch(config.stash[TALLY]))
    config.addinivalue_line("markers", "turns(n): CI runs one of n of its cases")
    _hide(config)


def _configure_hypothesis(config: pytest.Config) -> None:
    """Let hypothesis draw the same examples in every run, in a night those of its seed."""
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("fresh", derandomize=False, database=None, deadline=None)
    night = counts.mode() == "nightly"
    settings.load_profile("fresh" if night else "fixed")
    if night:
        config.option.hypothesis_seed = str(counts.seed())  # its plugin reads it after this


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput |= {"seed": counts.seed(), "commit": node.config.stash[COMMIT]}


class Watch:
    """On the controller: every report goes into the tally."""

    def __init__(self, tally: nightly.Tally) -> None:
        self.tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tally.take(report.outcome, str(report.when), report.user_properties)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The first line of every run, whatever else -q leaves out."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and TALLY in session.config.stash:
        commit = session.config.stash[COMMIT][:12] or "not known"
        reporter.write_line(
            f"seed {counts.seed()}, {counts.mode()} counts, commit {commit}; repeat with --seed "
            f"{counts.seed()}"
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    how = "" if counts.mode() == "ci" else f"--{counts.mode()} "
    for name in failed[:10]:
        terminalreporter.write_line(f"repeat with: pytest {how}--seed {counts.seed()} '{name}'")


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """Modules draw weights where they are imported."""
    if isinstance(collector, pytest.Module):
        randomness.seed_everything(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    randomness.seed_everything(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    case = getattr(request, "param_index", 0)
    with randomness.drawing_apart(f"{fixturedef.baseid}::{fixturedef.argname}[{case}]"):
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = config.getoption("--part")
    of = nightly.dealt([item.nodeid for item in items], parts)
    cases = Counter[str]()
    wanted = set[str]()
    for item in items:
        test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("turns")
        if of[item.nodeid] == part and (mark is None or counts.turn(cases[test], *mark.args)):
            wanted.add(item.nodeid)
        cases[test] += 1
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if counts.mode() == "nightly" and TALLY in config.stash and any(config.stash[TALLY].tests.values()):
        nightly.append(
            config.stash[TALLY].line(config.stash[COMMIT], "{}/{}".format(*config.getoption("--part")))
        )


@pytest.fixture
def ran(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """ran(name, many): for the night's line. Said before the work, so that what fails is counted as well."""

    def note(name: str, many: int) -> None:
        assert name.partition(": ")[0] in counts.FULL, name
        request.node.user_properties.append(("ran", (name, many)))

    return note


def _hide(config: pytest.Config) -> None:
    name = config.getoption("--hide")
    if not name:
        return
    import torch

    owner, missing = HIDDEN[name]
    if name == "onednn":
        torch._C._has_mkldnn = False
    elif name == "profiler":
        real = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        del torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        torch.autograd.__getattr__ = lambda name: _for_torch_only(name, missing, real)  # type: ignore[method-assign]
    else:
        parent, _, last = owner.rpartition(".")
        place = torch._C if parent == "torch._C" else torch.ops
        setattr(place, last, Hidden(getattr(place, last), missing))


def _for_torch_only(name: str, hidden: str, real: object) -> object:
    """A name of torch.autograd that torch itself (dynamo asks for it too) still finds, and nobody else
    does."""
    if name == hidden and sys._getframe(2).f_globals["__name__"].startswith("torch."):
        return real
    raise AttributeError(name)


class Hidden:
    """Stands in for a torch namespace from which one name is missing."""

    def __init__(self, real: object, missing: str) -> None:
        self._real, self._missing = real, missing

    def __getattr__(self, name: str) -> object:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._real, name)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """aerogel opens no connection unless it is given an address; a test that tries fails. Those marked
    `loopback` have servers of their own."""
    connect = socket.socket.connect
    own = request.node.get_closest_marker("loopback") is not None

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX or (own and address[0] == "127.0.0.1"):
            connect(self, address)
            return
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test starts with an empty store: kernels may be kept between runs, timings may not."""
    from aerogel.tune import store

    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "unknown")


@pytest.fixture(autouse=True)
def _unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run counts as disturbed, however busy the machine is that runs the tests."""
    from aerogel.backends import meter

    monkeypatch.setattr(meter, "measure_clock_step_ns", lambda: meter.LONGEST_STEP_NS * 1000)


@pytest.fixture(scope="module")
def small() -> Any:
    """(model, compiled by rule, example): a small pruned residual network."""
    import torch

    import aerogel
    from tests.small_models import Small, sparse

    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    return model, aerogel.compile(model, x, tune="off"), x


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Where others run beside it, two threads wait for each other, and timings are whatever they are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
