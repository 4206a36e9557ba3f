"""compile(): small models through the one path. Answers against float64, never a timing: those are in benchmarks/."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from aerogel.plan import Plan
from benchmarks.blocks import conv_bn
from benchmarks.models import Bottleneck, prune


def sparse(model: nn.Module, sparsity: float = 0.9) -> nn.Module:
    """Seeded, with batch-norm statistics that matter, pruned."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv1d | nn.Linear | nn.ConvTranspose2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if isinstance(module, nn.Conv1d):
            module.weight.data *= torch.rand_like(module.weight) < 0.2
    return prune(model.eval(), sparsity)


def right(model: nn.Module, fast: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
    """Network error against float64 at most twice eager's own (and a little, where eager is exact)."""
    with torch.no_grad():
        eager = model(*args, **kwargs)
        exact = copy.deepcopy(model).double()(*(a.double() for a in args), **{k: v.double() for k, v in kwargs.items()})
        got = fast(*args, **kwargs)
    leaves = [torch.utils._pytree.tree_leaves(v) for v in (eager, exact, got)]
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(eager)
    for e, x, g in zip(*leaves, strict=True):
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        allowed = 2 * (e - x).abs().max() + 1e-6 * x.abs().max()
        assert (g - x).abs().max() <= allowed, f"{(g - x).abs().max():.3g}, eager {(e - x).abs().max():.3g}"
    return got


class Small(nn.Module):
    """Stem with pooling, a strided bottleneck, another, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 16, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Bottleneck(16, 16, 32, 2), Bottleneck(32, 16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))  # type: ignore[no-any-return]


class Skip(nn.Module):
    """A skip tensor that is later relu_'d: what the add sees is the rectified one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        y = self.b(F.relu_(skip))
        out: Tensor = y + skip
        return out


class Fancy(nn.Module):
    """Two inputs, a keyword, a dict out; concat, chunk, resize, SiLU before add, 1xN kernels, transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv_bn(3, 8, (1, 5), act=nn.SiLU()), conv_bn(8, 8, (3, 1), act=nn.SiLU())
        self.c, self.up = conv_bn(16, 8, 3, act=nn.LeakyReLU(0.1)), nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: Tensor, other: Tensor, *, scale: Tensor) -> dict[str, Any]:
        a = self.a(x) * scale
        b = a + self.b(a)
        c = self.c(torch.cat([b, other], 1))
        left, half = c.chunk(2, 1)
        return {"up": self.up(c), "pair": (F.interpolate(left, scale_factor=2), half), "same": other}


class Looping(nn.Module):
    """A loop on data: torch.export cannot take it whole, but its backbone is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Small().blocks, nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x))
        while float(y.abs().max()) > 1e3:
            y = y / 2
        return y  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, aerogel.Compiled, Tensor]:
    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    return model, aerogel.compile(model, x, tune="off"), x


def test_every_convolution_runs_on_our_kernels(small: Any) -> None:
    model, fast, x = small
    right(model, fast, x)
    assert [c.config.method for c in fast.plan.choices] == ["direct"] * 8
    report = aerogel.explain(fast)
    assert "8 of 8 convolutions on sparse kernels" in str(report)
    assert "Escort" in str(report)
    assert len(report.to_dict()["layers"]) == 8
    assert "<table>" in report._repr_html_()


def test_other_batches_and_sizes(small: Any) -> None:
    model, fast, _ = small
    for shape in ((1, 3, 64, 64), (2, 3, 64, 64), (7, 3, 64, 64), (32, 3, 64, 64), (1, 3, 96, 48), (3, 3, 37, 81)):
        right(model, fast, torch.randn(shape))
    assert len(fast._programs) <= 8


def test_results_alias_nothing(small: Any) -> None:
    _, fast, _ = small
    a, b = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 64, 64)
    first = fast(a)
    kept = first.clone()
    fast(b)
    assert torch.equal(first, kept)
    assert torch.equal(fast(a), kept), "same input, same bits"


def test_whatever_the_arena_held_changes_nothing(small: Any) -> None:
    _, fast, x = small
    wanted = fast(x)
    for fill in (0xFF, 0x00, 0x7F):
        for free in fast._free.values():
            for workspace in free:
                workspace.arena[:] = fill
                workspace.scratch[:] = fill
        assert torch.equal(fast(x), wanted)


def test_many_threads_on_one_module(small: Any) -> None:
    _, fast, _ = small
    inputs = [torch.randn(1 + i % 3, 3, 64, 64 + 16 * (i % 2)) for i in range(16)]
    wanted = [fast(x) for x in inputs]
    wrong = []

    def work(start: int) -> None:
        for i in range(20):
            j = (start + i) % len(inputs)
            if not torch.equal(fast(inputs[j]), wanted[j]):
                wrong.append(j)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_timed_compile_is_right_and_replays(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(model, x, progress=False)
    right(model, fast, x)
    assert fast.plan.model is not None
    assert all(c.tried for c in fast.plan.choices)
    again = aerogel.compile(model, x, plan=Plan.from_json(fast.plan.to_json()))
    right(model, again, x)
    assert again.plan == fast.plan
    assert "us, dense" in str(aerogel.explain(fast))
    one = aerogel.explain(fast, layer=fast.plan.choices[0].layer)
    assert len(one.layers) == 1
    with pytest.raises(aerogel.AerogelError, match="no layer is called"):
        aerogel.explain(fast, layer="nothing")


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95])
def test_a_skip_that_is_rectified_in_place(sparsity: float) -> None:
    model, x = sparse(Skip(), sparsity), torch.randn(2, 3, 9, 11)
    right(model, aerogel.compile(model, x, tune="off"), x)


def test_inputs_outputs_and_odd_layers() -> None:
    model = sparse(Fancy(), 0.8)
    x, other, scale = torch.randn(1, 3, 12, 12), torch.randn(1, 8, 12, 12), torch.randn(1, 1, 1, 1)
    fast = aerogel.compile(model, (x, other), {"scale": scale}, tune="off")
    got = right(model, fast, x, other, scale=scale)
    assert got["same"].data_ptr() != other.data_ptr()
    assert "conv_transpose2d has no sparse kernel" in str(aerogel.explain(fast))
    right(model, fast, torch.randn(3, 3, 20, 14), torch.randn(3, 8, 20, 14), scale=torch.randn(3, 1, 1, 1))


def test_one_dimension() -> None:
    model = sparse(nn.Sequential(nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 3, 2, 1), nn.Conv1d(8, 6, 1)))
    x = torch.randn(2, 4, 50)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert [c.config.method for c in fast.plan.choices] == ["direct"] * 3


def test_three_dimensions_are_refused_in_words() -> None:
    model = sparse(nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()))
    x = torch.randn(1, 2, 5, 6, 7)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert "conv3d has no sparse kernel; torch runs it" in str(aerogel.explain(fast))


def test_what_does_not_export_is_compiled_in_parts() -> None:
    model, x = sparse(Looping()), torch.randn(1, 16, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    said = str(aerogel.explain(fast))
    assert "backbone: compiled as a part of its own" in said
    assert "torch.export cannot take the whole model" in said
    assert {c.layer.split(".")[0] for c in fast.plan.choices} == {"backbone", "head"}


def test_a_compiled_module_is_for_inference(small: Any) -> None:
    _, fast, x = small
    with pytest.raises(aerogel.AerogelError, match="cannot train"):
        fast.train()
    with pytest.raises(aerogel.AerogelError, match="requires grad"):
        fast(x.clone().requires_grad_())
    with pytest.raises(aerogel.AerogelError, match="stays where it was compiled"):
        fast.half()
    with pytest.raises(aerogel.AerogelError, match="stays where it was compiled"):
        fast.to(torch.float64)
    assert fast.eval() is fast
    with pytest.raises(aerogel.ShapeError, match="dimension 1; the model takes 3"):
        fast(torch.randn(1, 4, 64, 64))
    with pytest.raises(aerogel.ShapeError, match="dimensions"):
        fast(torch.randn(3, 64, 64))
    with pytest.raises(aerogel.ShapeError, match="another structure"):
        fast(x, x)
    with pytest.raises(aerogel.UnsupportedModel, match=r"call model\.eval\(\) first"):
        aerogel.compile(Small().train(), x, plan=fast.plan)
    with pytest.raises(aerogel.AerogelError, match="methods are"):
        aerogel.compile(Small().eval(), x, methods=["magic"])


def test_state_dict_is_the_originals_and_loads_where_masks_agree(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(copy.deepcopy(model), x, tune="off")
    state = fast.state_dict()
    assert state.keys() == model.state_dict().keys()
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter *= 1.25
    fast.load_state_dict(tuned.state_dict())
    right(tuned, fast, x)
    state = {k: v.clone() for k, v in state.items()}
    state["stem.0.0.weight"] += 1
    with pytest.raises(aerogel.AerogelError, match="has other zeros"):
        fast.load_state_dict(state)


def test_copies_answer_alike(small: Any) -> None:
    _, fast, x = small
    wanted = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), wanted)


def _child(fast: aerogel.Compiled, x: Tensor, answers: Any) -> None:
    answers.put(fast(x).numpy())


def test_another_process_answers_alike(small: Any) -> None:
    _, fast, x = small
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_child, args=(fast, x, answers))
    process.start()
    got = answers.get(timeout=120)
    process.join()
    assert not fast(x).isnan().any(), "sending a module away leaves it whole"
    assert torch.equal(torch.from_numpy(got), fast(x))


def test_strict_nan_keeps_layers_dense(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(model, x, tune="off", strict_nan=True)
    assert {c.config.method for c in fast.plan.choices} == {"dense"}
    right(model, fast, x)


def test_another_thread_count_warns_once(small: Any) -> None:
    model, _, x = small
    before = torch.get_num_threads()
    fast = aerogel.compile(model, x, tune="off")
    try:
        torch.set_num_threads(before + 1)
        with pytest.warns(UserWarning, match=r"tuned for .* threads, running on"):
            fast(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right(model, fast, x)
    finally:
        torch.set_num_threads(before)


def test_the_profiler_shows_layers_by_name(small: Any) -> None:
    _, fast, x = small
    if not hasattr(torch.autograd, "_profiler_enabled"):
        pytest.skip("this torch does not say whether it is being profiled")
    wanted = fast(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(fast(x), wanted)
    names = {event.key for event in profile.key_averages()}
    assert {"aerogel::direct stem.0.0", "aerogel::pool stem.1", "aerogel::direct blocks.1.conv2.0"} <= names


def test_a_torch_that_hides_its_profiler_still_runs(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, x = small
    wanted = fast(x)
    monkeypatch.delattr(torch.autograd, "_profiler_enabled", raising=False)
    assert torch.equal(fast(x), wanted)


def test_torch_compile_and_export_around_a_compiled_module(small: Any) -> None:
    _, fast, x = small

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fast

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2) + 1  # type: ignore[no-any-return]

    around = Around().eval()
    wanted = around(x)
    exported = torch.export.export(around, (x,)).module()
    assert torch.equal(exported(x), wanted)
    compiled = torch.compile(around, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_opcheck(small: Any) -> None:
    _, fast, x = small
    torch.library.opcheck(torch.ops.aerogel.run.default, ([x], fast._number))
