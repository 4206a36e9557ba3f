"""torchao's own quantizer: converted programs in integers, and masks that hold while a model learns with
fake-quantised numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel.ir import INT8

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, where programs are copied


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c, self.d = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 12, 1), nn.Conv2d(12, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.n(self.a(x)))
        x = nn.functional.max_pool2d(torch.relu(self.b(x) + x), 2)
        y: Tensor = self.head(self.d(torch.relu(self.c(x))).mean((2, 3)))
        return y


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16)


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (images(2),), dynamic_shapes=({0: torch.export.Dim("n")},)).module()


def prepared(program: Any, learns: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=learns))
        return (prepare_qat_pt2e if learns else prepare_pt2e)(program, quantizer)


def converted(program: Any) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    return convert_pt2e(program)


def integers(fast: Any) -> list[Any]:
    return [c for c in fast.plan.choices if c.conv.dtypes == INT8]


def test_a_converted_program_runs_in_integers() -> None:
    torch.manual_seed(0)
    program = prepared(exported(Net().eval()), learns=False)
    for _ in range(5):
        program(images())
    model = converted(program)
    fast = aerogel.compile(model, (images(2),), tune="off")
    assert len(integers(fast)) == 3, fast.notes
    for _ in range(3):
        x = images()
        wanted = model(x)
        assert (fast(x) - wanted).norm() <= 0.02 * wanted.norm()


def test_masks_hold_under_fake_quantisation() -> None:
    """A Schedule prunes while the program learns; what is zero is zero in every step, in the signed bytes and
    in what is packed."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 8, 1)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    schedule = aerogel.Schedule(model, 0.75, steps=8, pattern="1x4")
    program = exported(model)
    for node in program.graph.nodes:  # quantizers know layers by their class, which a mask changes
        if node.target is torch.ops.aten.conv2d.default:
            node.meta["source_fn_stack"] = [(node.name, nn.functional.conv2d)]
    program = prepared(program, learns=True)
    optimizer = torch.optim.SGD(program.parameters(), 0.02, momentum=0.9)
    gone: list[Tensor] = []
    for _ in range(14):
        (program(images()) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        now = [layer.weight.detach() == 0 for layer in layers]
        assert all(bool(after[before].all()) for before, after in zip(gone, now, strict=bool(gone)))
        gone = now
    from torchao.quantization.pt2e import move_exported_model_to_eval

    move_exported_model_to_eval(program)
    done = converted(program)
    fast = aerogel.compile(done, (images(2),), tune="off")
    own = integers(fast)
    assert len(own) == 2, fast.notes
    for choice, zero in zip(own, gone, strict=False):
        assert choice.config.method == "quads"
        assert choice.sparsity >= float(zero.float().mean()) > 0.7
    network: Any = fast.network
    for node, zero in zip(network.convs(), gone, strict=False):
        assert not network.weight(node).array[zero.numpy()].any()
    x = images()
    assert (fast(x) - done(x)).norm() <= 0.02 * done(x).norm()
