"""Channels permuted for blocks: the same answers, blocks that keep more, and what is left alone."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from typer.testing import CliRunner

import aerogel
from aerogel.cli.main import app
from aerogel.errors import AerogelError, InvalidArgument
from aerogel.pruning.masks import masks
from aerogel.pruning.permute import ordered


class Ties(nn.Module):
    """Every way in which channels are tied: additions, concatenation, depthwise, a gate, a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16)
        self.depth, self.act = nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.PReLU(16)
        self.one, self.two = nn.Conv2d(16, 24, 1, bias=False), nn.Conv2d(24, 16, 3, 1, 1)
        self.beside, self.gate = nn.Conv2d(16, 12, 1), nn.Conv2d(16, 16, 1)
        self.after, self.up = nn.Conv2d(28, 20, 3, 2, 1), nn.ConvTranspose2d(20, 8, 2, 2)
        self.head = nn.Linear(8, 12)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        z = y + self.two(F.hardswish(self.one(self.act(self.depth(y)))))
        z = z * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(z, 1)))
        z = F.pad(self.after(torch.cat([self.beside(z), z], 1)), (1, 0, 1, 0))
        return self.last(F.relu(self.head(self.up(z).mean((2, 3)))))  # type: ignore[no-any-return]


X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LEFT_OUT = ("stem", "depth", "last")


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Ties().eval()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(
                torch.rand_like(value) + 0.5 if value.dim() == 1 else torch.randn_like(value) ** 3 / 9
            )
    return model


def block_sums(model: Any, share: float = 0.75) -> float:
    """What the best blocks keep of all weights."""
    sizes = {
        n: m.weight.detach().abs() for n, m in model.named_modules() if n in ("one", "two", "gate", "after")
    }
    kept = masks(sizes, dict.fromkeys(sizes, share), "1x4")
    return float(sum((sizes[n] * kept[n]).sum() / sizes[n].sum() for n in sizes))


def without_masks(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    return model


def permuted(model: nn.Module, x: Tensor = X, share: float = 0.75) -> nn.Module:
    """With all of its weights."""
    return without_masks(aerogel.prune(model, share, pattern="1x4", exclude=LEFT_OUT, permute=x))


def test_the_answers_stay_and_blocks_keep_more() -> None:
    model = net().double()
    dense = copy.deepcopy(model)
    with torch.no_grad():
        found = permuted(model, X.double())
        assert found is model
        torch.testing.assert_close(model(X.double()), dense(X.double()), rtol=1e-11, atol=1e-11)
    assert block_sums(model) > 1.02 * block_sums(dense)
    moved = {n for n, v in model.state_dict().items() if not v.equal(dense.state_dict()[n])}
    held = {"last.bias", "norm.num_batches_tracked"}
    assert {"norm.running_var", "act.weight", "depth.bias", "up.weight", "stem.weight"} <= moved
    assert not moved & held


def test_whole_numbers_are_exact() -> None:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(8, 4, 1))
    for value in model.parameters():
        value.data = torch.randint(-9, 9, value.shape).float()
    x = torch.randint(-9, 9, (2, 4, 8, 8)).float()
    dense = copy.deepcopy(model.eval())
    without_masks(aerogel.prune(model, 0.5, pattern="1x4", permute=x))
    assert not model[0].weight.equal(dense[0].weight)
    assert torch.equal(model(x), dense(x))


def test_hidden_blocks_are_found() -> None:
    """Channels that only lie apart come together, and nothing is lost."""
    torch.manual_seed(0)
    kept = (torch.rand(32, 8) < 0.25).repeat_interleave(4, 1)[:, torch.randperm(32)].float()
    columns = (torch.rand(32, 32) + 0.5) * kept
    order = ordered(columns.T.contiguous(), torch.full((32,), 0.01), 4)
    assert sorted(order.tolist()) == list(range(32))
    sums = columns[:, order].reshape(32, 8, 4).sum(2)
    before = columns.reshape(32, 8, 4).sum(2)
    assert int((sums > 0).sum()) < int((before > 0).sum())
    again = ordered(columns.T[order].contiguous(), torch.full((32,), 0.01), 4)
    assert again.equal(torch.arange(32)), "no two channels that would gain by changing places are left"
    full = columns.T[:30].contiguous()
    assert ordered(full, torch.full((32,), 0.8), 4)[28:].tolist() == [28, 29], "no whole block: they stay"


def test_masks_go_along() -> None:
    model = aerogel.prune(net(), 0.5, exclude=LEFT_OUT)
    before, zeros = copy.deepcopy(model), {n: int((m.weight == 0).sum()) for n, m in layers(model)}
    aerogel.prune(model, 0.0, pattern="1x4", exclude=LEFT_OUT, permute=X)
    assert zeros == {n: int((m.weight == 0).sum()) for n, m in layers(model)}
    torch.testing.assert_close(model(X), before(X), rtol=1e-4, atol=1e-4)
    aerogel.prune(model, 0.8, pattern="1x4", exclude=LEFT_OUT, permute=X)
    for _, layer in layers(model):
        assert float((layer.weight == 0).double().mean()) >= 0.75


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if n in ("one", "two", "gate", "after", "head")]


class Splits(nn.Module):
    """Python that counts channels: those stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, 1)
        return self.c(self.b(left - right))  # type: ignore[no-any-return]


def test_what_is_not_known_stays_and_is_named() -> None:
    torch.manual_seed(0)
    model = Splits().eval()
    dense = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"stay in their order: 'b': .* gives them"):
        aerogel.prune(model, 0.5, pattern="1x4", permute=X)
    without_masks(model)
    assert torch.equal(model.a.weight, dense.a.weight)
    assert not torch.equal(model.c.weight, dense.c.weight)
    torch.testing.assert_close(model(X), dense(X))


class Along(nn.Module):
    """Pooling in one dimension of features without one: it goes over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.avg_pool1d(self.a(x), 3, 1, 1))  # type: ignore[no-any-return]


def test_pooling_over_channels_holds_them() -> None:
    model = Along().eval()
    before = model.a.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"'b': aten.avg_pool1d.default of .* gives them"):
        aerogel.prune(model, 0.02, pattern="1x4", permute=torch.randn(3, 8))
    without_masks(model)
    assert torch.equal(model.a.weight, before)


def test_a_weight_of_several_parameters_stays_and_is_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 16, 1)), nn.Conv2d(16, 16, 1))
    with pytest.warns(UserWarning, match="'0.weight' is computed from other numbers"):
        aerogel.prune(model.eval(), 0.5, pattern="1x4", permute=torch.randn(2, 4, 8, 8))


def test_no_warning_where_all_may_move() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        permuted(net())


def test_the_model_may_be_in_training() -> None:
    model = net().train()
    dense = copy.deepcopy(model).eval()
    permuted(model)
    assert model.training
    torch.testing.assert_close(model.eval()(X), dense(X), rtol=1e-4, atol=1e-4)


def test_mistakes_are_said() -> None:
    with pytest.raises(InvalidArgument, match="pattern='1x4'"):
        aerogel.prune(net(), 0.5, permute=X)
    recipe = {"one": ("1x4", 0.5), "two": ("1x8", 0.5)}
    with pytest.raises(InvalidArgument, match="blocks of the same size"):
        aerogel.prune(net(), recipe, permute=X)
    with pytest.raises(AerogelError):
        aerogel.prune(net(), 0.5, pattern="1x4", permute=X[:, :2])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net(), (X,), path, dynamo=False)
    return path


def answered(path: Path) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]


def test_a_file_is_written_with_its_channels_permuted(file: Path, tmp_path: Path) -> None:
    model = aerogel.OnnxModel(file)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    without_masks(aerogel.prune(model, 0.75, pattern="1x4", permute=X))
    assert sum(not value.equal(before[name]) for name, value in model.state_dict().items()) > 6
    model.save(tmp_path / "p.onnx")
    np.testing.assert_allclose(answered(tmp_path / "p.onnx"), answered(file), rtol=1e-3, atol=1e-3)


def test_the_flag(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.onnx"
    words = ["prune", str(file), "-o", str(out), "--sparsity", "0.5", "--pattern", "1x4", "--permute"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    plain = aerogel.finalize(aerogel.prune(aerogel.OnnxModel(file), 0.5, pattern="1x4")).state_dict()
    other = aerogel.OnnxModel(out).state_dict()
    assert any(not torch.equal(value, plain[name]) for name, value in other.items())
