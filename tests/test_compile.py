"""compile(): small models through the one path. Answers against float64, never a timing: those are in
benchmarks/."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel.ir import Plan
from tests.small_models import Fancy, Looping, Picks, Skip, right, runs, sparse


def test_every_convolution_runs_on_our_kernels(small: Any) -> None:
    model, fast, x = small
    right(model, fast, x)
    assert [c.config.method for c in fast.plan.choices] == ["direct"] * 8 + ["dense"]
    report = aerogel.explain(fast)
    assert "8 of 9 layers on sparse kernels" in str(report)
    assert "Escort" in str(replace(report, verbose=True))
    assert len(report.to_dict()["layers"]) == 9
    assert "<table>" in report._repr_html_()


def test_other_batches_and_sizes(small: Any) -> None:
    model, fast, _ = small
    for shape in (
        (1, 3, 64, 64),
        (2, 3, 64, 64),
        (7, 3, 64, 64),
        (32, 3, 64, 64),
        (1, 3, 96, 48),
        (3, 3, 37, 81),
    ):
        right(model, fast, torch.randn(shape))
    assert len(runs(fast).programs) <= 8


def test_timed_compile_is_right_and_replays(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(model, x, progress=False)
    right(model, fast, x)
    assert fast.plan.model is not None
    assert all(c.tried for c in fast.plan.choices)
    again = aerogel.compile(model, x, plan=Plan.from_json(fast.plan.to_json()))
    right(model, again, x)
    assert again.plan == fast.plan
    assert "us, dense" in str(aerogel.explain(fast, verbose=True))
    one = aerogel.explain(fast, layer=fast.plan.choices[0].layer)
    assert len(one.layers) == 1
    with pytest.raises(aerogel.AerogelError, match="no layer is called"):
        aerogel.explain(fast, layer="nothing")


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95])
def test_a_skip_that_is_rectified_in_place(sparsity: float) -> None:
    model, x = sparse(Skip(), sparsity), torch.randn(2, 3, 9, 11)
    right(model, aerogel.compile(model, x, tune="off"), x)


def test_a_dense_model_is_told_to_stay_where_it_is() -> None:
    model = sparse(Skip(), 0.0)
    assert (
        "keep that"
        in str(aerogel.explain(aerogel.compile(model, torch.randn(1, 3, 9, 9), tune="off"))).splitlines()[0]
    )


class Tail(nn.Module):
    """What may follow a backbone: an average over the image, flattened by a view, with batch norm between two
    Linears."""

    def __init__(self, average: str) -> None:
        super().__init__()
        self.average, self.conv = average, nn.Conv2d(3, 24, 3, padding=1)
        self.first, self.norm, self.last = nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x).relu()
        if self.average == "view":
            pooled = nn.functional.adaptive_avg_pool2d(y, 1).view(y.shape[0], -1)
        elif self.average == "read twice":
            pooled = nn.functional.adaptive_avg_pool2d(y, (1, 1)).flatten(1)
        else:
            pooled = y.mean((2, 3)) if self.average == "mean" else y.mean(3).mean(2)
        out = self.last(nn.functional.dropout(self.norm(self.first(pooled)), training=False).relu())
        return out, pooled if self.average == "read twice" else self.last(
            pooled[:, None, :1] * torch.ones(40)
        )


class Folded(nn.Module):
    """A mean reshaped into something that is no flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3), keepdim=True).reshape(x.shape[0], 4, 6)  # type: ignore[no-any-return]


def test_a_mean_reshaped_is_no_flatten() -> None:
    model, x = sparse(Folded()), torch.randn(2, 3, 9, 9)
    right(model, aerogel.compile(model, x, tune="off"), x)


@pytest.mark.parametrize("average", ["view", "mean", "read twice", "rows"])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_average_and_linear_run_in_the_segment(average: str, sparsity: float) -> None:
    torch.manual_seed(0)
    model, x = sparse(Tail(average), sparsity), torch.randn(3, 3, 11, 70)
    for module in (model.first, model.last) if sparsity else ():
        module.weight.data *= torch.rand_like(module.weight) < 0.1  # type: ignore[union-attr, operator, arg-type]
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    kept = fast(x)[1].clone()
    first = fast(x)[1]
    fast(torch.randn(3, 3, 11, 70))
    assert torch.equal(first, kept), "an answer changed with the next call"
    program = next(iter(runs(fast).programs.values()))
    ops = [p.node.op for p in program.parts if p.node is not None]
    assert ("aten.mean.dim" in ops) == (average == "rows" or not sparsity)


class Twice(nn.Module):
    """A skip that two adds read: only the last reader may write over it."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = self.convs
        skip = a(x)
        y = c(b(x)).relu() + skip
        z = d(y).relu() + skip
        return e(z) + z  # type: ignore[no-any-return]


def test_a_residual_is_overwritten_by_its_last_reader_only() -> None:
    model, x = sparse(Twice()), torch.randn(2, 8, 15, 15)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    program = next(iter(runs(fast).programs.values()))
    steps = [s for part in program.parts for s in part.natives if s.residual is not None]
    places = program.offsets
    in_place = [places[s.y] == places[s.residual] for s in steps if s.residual]
    assert any(in_place)
    assert not all(in_place)


class Views(nn.Module):
    """Writes into a part of a map: the whole map changes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[:, :4].relu_()
        return self.b(y)  # type: ignore[no-any-return]


def test_a_write_into_a_view_is_never_lost() -> None:
    model, x = sparse(Views(), 0.8), torch.randn(2, 3, 9, 11)
    right(model, aerogel.compile(model, x, tune="off"), x)


def test_batch_norm_after_a_bias_and_on_its_own() -> None:
    layers = [
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1),
    ]
    model, x = sparse(nn.Sequential(*layers), 0.8), torch.randn(2, 3, 14, 11)
    for bias in (layers[1].bias, layers[5].bias):
        nn.init.normal_(bias)  # type: ignore[arg-type]
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert [str(c.conv.layer()) for c in fast.plan.choices] == [
        "c3k3r1s1u1p0g3+bias", "c3k8r3s3u1p0+bias+relu", "c8k8r1s1u1p0g8+bias", "c8k4r1s1u1p0+bias",
    ]  # fmt: skip


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95])
def test_inputs_outputs_and_odd_layers(sparsity: float) -> None:
    model = sparse(Fancy(), sparsity)
    x, other, scale = torch.randn(1, 3, 12, 12), torch.randn(1, 8, 12, 12), torch.randn(1, 1, 1, 1)
    fast = aerogel.compile(model, (x, other), {"scale": scale}, tune="off")
    got = right(model, fast, x, other, scale=scale)
    assert got["same"].data_ptr() != other.data_ptr()
    assert "conv_transpose2d has no sparse kernel" in str(aerogel.explain(fast))
    right(model, fast, torch.randn(3, 3, 20, 14), torch.randn(3, 8, 20, 14), scale=torch.randn(3, 1, 1, 1))


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95])
def test_one_dimension(sparsity: float) -> None:
    layers = nn.Sequential(
        nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 3, 2, 1), nn.Conv1d(8, 6, 1)
    )
    model, x = sparse(layers, sparsity), torch.randn(2, 4, 50)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert [c.config.method for c in fast.plan.choices] == ["direct" if sparsity else "dense"] * 3


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95])
def test_three_dimensions_are_refused_in_words(sparsity: float) -> None:
    model = sparse(nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()), sparsity)
    x = torch.randn(1, 2, 5, 6, 7)
    for tune in ("off", "fast"):  # timed, it is also compared with torch in a layout that volumes have not
        fast = aerogel.compile(model, x, tune=tune)
        right(model, fast, x)
        assert "conv3d has no sparse kernel; torch runs it" in str(aerogel.explain(fast))


def test_sizes_that_depend_on_data() -> None:
    """However the model is taken, an answer is never computed on another size's memory."""
    model = sparse(Picks(), 0.8)
    inputs = [torch.randn(1, 3, 24, 24) + 0.1 * i for i in range(6)]
    fast = aerogel.compile(model, inputs[0], tune="off")
    for x in inputs:
        right(model, fast, x)


def test_other_precisions_are_left_to_torch_in_words() -> None:
    model = sparse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())).double()
    with pytest.warns(UserWarning, match="float64"):
        fast = aerogel.compile(model, torch.randn(1, 3, 12, 12, dtype=torch.float64), tune="off")
    assert "its weight is torch.float64" in str(aerogel.explain(fast))
    assert not fast.plan.choices


def test_answers_that_differ_are_never_given(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gone wrong is seen on the example, and torch runs the model."""
    model, _, x = small
    monkeypatch.setattr("aerogel.runtime.module.Network.outputs", lambda self, values: [torch.zeros(1, 10)])
    fast = aerogel.compile(model, x, methods=["direct"])
    assert str(fast.how) == "contiguous"
    assert "answers differed" in str(aerogel.explain(fast))


def test_what_does_not_export_is_compiled_in_parts() -> None:
    model, x = sparse(Looping()), torch.randn(1, 16, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    said = str(aerogel.explain(fast, verbose=True))
    assert "backbone: compiled as a part of its own" in said
    assert "torch.export cannot take the whole model" in said
    assert {c.layer.split(".")[0] for c in fast.plan.choices} == {"backbone", "head"}


def test_strict_nan_keeps_layers_dense(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(model, x, tune="off", strict_nan=True)
    assert {c.config.method for c in fast.plan.choices} == {"dense"}
    right(model, fast, x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor, times: int, *more: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.conv(x) * times + sum(more)
        return y * 2 if twice else y


def test_numbers_beside_tensors() -> None:
    """Another number is another program, captured when it is met; a file has none."""
    model, x, more = sparse(Scaled()), torch.randn(1, 3, 9, 9), torch.randn(1, 8, 9, 9)
    fast = aerogel.compile(model, (x, 3, more, more), {"twice": True}, tune="off")
    assert str(fast.how) == "graph"
    assert (fast(x, 3, more, more, twice=True) - model(x, 3, more, more, twice=True)).abs().max() < 1e-5
    for number, twice in ((4, True), (3, False), (4, True), (3, 1)):
        wanted = model(x, number, more, more, twice=twice)
        for _ in range(2):
            assert (fast(x, number, more, more, twice=twice) - wanted).abs().max() < 1e-5
