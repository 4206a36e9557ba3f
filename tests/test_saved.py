"""save() and load(): the same bits back, in another process, on another kind of CPU; damaged files are
refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.errors import AerogelError, InvalidFile, UnsupportedModel
from aerogel.ir import EAGER, short
from aerogel.saved import container
from tests.small_models import Fancy, Looping, Small, sparse


@pytest.fixture(scope="module")
def small() -> Any:
    return sparse(Small())


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_the_same_bits_come_back(small: Any, dtype: Any, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(small, x, tune="off", dtype=dtype)
    aerogel.save(fast, tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero")
    assert torch.equal(again(x), fast(x))
    assert torch.equal(again(torch.cat([x, x])), fast(torch.cat([x, x])))
    assert again.plan == fast.plan
    assert list(again.state_dict()) == list(small.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), small.state_dict().values(), strict=True)
    )
    again.load_state_dict({k: v * 2 if v.dim() == 4 else v for k, v in small.state_dict().items()})
    assert not torch.equal(again(x), fast(x))


def test_another_process_and_any_structure(tmp_path: Path) -> None:
    model = sparse(Fancy())
    args, kwargs = (torch.randn(1, 3, 12, 14), torch.randn(1, 8, 12, 14)), {"scale": torch.rand(1, 8, 1, 1)}
    fast = aerogel.compile(model, args, kwargs, tune="off")
    aerogel.save(fast, tmp_path / "m.aero")
    wanted = torch.utils._pytree.tree_leaves(fast(*args, **kwargs))
    np.savez(tmp_path / "in.npz", *(a.numpy() for a in args), scale=kwargs["scale"].numpy())
    code = (
        "import sys, numpy as np, torch, aerogel; d = np.load(sys.argv[1] + '/in.npz'); f = "
        "aerogel.load(sys.argv[1] + '/m.aero');"
        "y = f(*(torch.from_numpy(d[k]) for k in ('arr_0', 'arr_1')), scale=torch.from_numpy(d['scale']));"
        "np.savez(sys.argv[1] + '/out.npz', *(t.numpy() for t in torch.utils._pytree.tree_leaves(y)));"
        "assert 'tests' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    got = np.load(tmp_path / "out.npz")
    assert all(np.array_equal(w.numpy(), got[f"arr_{i}"]) for i, w in enumerate(wanted))
    assert torch.utils._pytree.tree_structure(aerogel.load(tmp_path / "m.aero")(*args, **kwargs)) == (
        torch.utils._pytree.tree_structure(model(*args, **kwargs))
    )


def test_what_torch_runs_is_saved_too(small: Any, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(small, x, tune="off")
    kept = aerogel.Compiled(small, None, fast.plan, EAGER, ("so it was",), None, fast.captured)
    aerogel.save(kept, tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero")
    assert str(again.how) == "contiguous"
    assert torch.equal(again(x), small(x))
    assert "so it was" in str(aerogel.explain(again))


def test_zeros_are_left_out(tmp_path: Path) -> None:
    model = sparse(nn.Sequential(nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3)))
    aerogel.save(aerogel.compile(model, torch.randn(1, 64, 12, 12), tune="off"), tmp_path / "m.aero")
    whole = sum(v.nbytes for v in model.state_dict().values())
    assert (tmp_path / "m.aero").stat().st_size < 0.3 * whole, "as they were, and as kernels read them"


def test_parts_have_no_file(tmp_path: Path) -> None:
    fast = aerogel.compile(sparse(Looping()), torch.randn(1, 16, 20, 20), tune="off")
    with pytest.raises(UnsupportedModel, match="in parts"):
        aerogel.save(fast, tmp_path / "m.aero")


def test_another_kind_of_cpu_chooses_by_rule(small: Any, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(small, x, tune="off")
    aerogel.save(fast, tmp_path / "m.aero")
    texts, arrays = container.from_bytes((tmp_path / "m.aero").read_bytes())
    plan = json.loads(texts["plan0"])
    plan["target"] = plan["target"].replace("cpu-avx512", "cpu-neon").replace("cpu-avx2", "cpu-neon")
    (tmp_path / "m.aero").write_bytes(container.to_bytes(texts | {"plan0": json.dumps(plan)}, arrays))
    again = aerogel.load(tmp_path / "m.aero")
    assert (again(x) - small(x)).abs().max() < 1e-4
    assert f"saved on neon, chosen by rule for {short(fast.plan.target)}" in str(aerogel.explain(again))


def test_a_graph_that_makes_no_sense_is_refused(small: Any, tmp_path: Path) -> None:
    aerogel.save(aerogel.compile(small, torch.randn(1, 3, 64, 64), tune="off"), tmp_path / "m.aero")
    texts, arrays = container.from_bytes((tmp_path / "m.aero").read_bytes())
    for part in ("network", "graph"):
        graph = json.loads(texts[part])
        pool = next(n for n in graph["nodes"] if "pool" in n["op"] or "relu" in n["op"])
        pool["op"] = "aten.mm.default"
        pool["args"] = pool["args"][:1] * 2
        (tmp_path / "m.aero").write_bytes(container.to_bytes(texts | {part: json.dumps(graph)}, arrays))
        with pytest.raises(InvalidFile, match=f"'{pool['name']}' does not run on the file's own example"):
            # the model as it was captured is looked at when it is first asked for
            aerogel.load(tmp_path / "m.aero").original  # noqa: B018


def test_loading_can_measure_again(small: Any, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64)
    aerogel.save(aerogel.compile(small, x, tune="off"), tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero", tune=0.5, store=tmp_path / "store")
    assert again.plan.model is not None
    assert (again(x) - small(x)).abs().max() < 1e-4


def test_disk_that_takes_nothing(small: Any, tmp_path: Path) -> None:
    fast = aerogel.compile(small, torch.randn(1, 3, 64, 64), tune="off")
    (tmp_path / "file").write_text("")
    with pytest.raises(AerogelError, match="cannot be written"):
        aerogel.save(fast, tmp_path / "file" / "m.aero")
    with pytest.raises(InvalidFile, match="cannot be read"):
        aerogel.load(tmp_path / "none.aero")


class Cast(nn.Module):
    """A sum of two element types: the residual's is not the convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + y.double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [Small, Cast])
def test_a_file_of_the_version_before(made: type[nn.Module], tmp_path: Path) -> None:
    """It holds no element types; they are told."""
    model, x = sparse(made(), 0.8), torch.randn(2, 3, 32, 32)
    aerogel.save(aerogel.compile(model, x, tune="off"), tmp_path / "new.aero")
    texts, arrays = container.from_bytes((tmp_path / "new.aero").read_bytes())
    raw = json.loads(texts["model"])
    del raw["types"]
    texts |= {"model": json.dumps(raw | {"format": "aerogel-model-2"})}
    (tmp_path / "old.aero").write_bytes(container.to_bytes(texts, arrays))
    new, old = aerogel.load(tmp_path / "new.aero"), aerogel.load(tmp_path / "old.aero")
    assert torch.equal(new(x), old(x))
    assert new.captured is not None
    assert old.captured is not None
    nodes = {node.name for node in new.captured.graph.nodes}
    assert {n: t for n, t in old.captured.types.items() if n in nodes} == {
        n: t for n, t in new.captured.types.items() if n in nodes
    }
