"""What a GPU's host code must do, without a GPU: on PoCL through OpenCL, and on tensors without memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import aerogel
from aerogel.backends import cuda_index, using
from aerogel.backends.gpu import cuda
from aerogel.backends.gpu.backend import OnGpu
from aerogel.backends.gpu.layer import Layer
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.codegen.gpu import nvrtc
from aerogel.codegen.gpu.launch import Code
from aerogel.ir import Config, Conv, Weight
from aerogel.runtime.eager import nearby
from aerogel.runtime.reading import network_of
from aerogel.tune import whole
from tests.test_ondevice import Quick, Small

Run = Callable[[list[Any]], list[Any]]
SPARSE = ("direct", "stridepack")


def _small() -> tuple[nn.Module, torch.Tensor]:
    model = Small().eval()
    aerogel.prune(model, 0.8, exclude=["head"])
    aerogel.finalize(model)
    return model, torch.randn(2, 3, 12, 10)


def test_other_sizes_are_made_on_the_device_of_the_example() -> None:
    model, x = _small()
    network, _ = network_of(model, ((x,), {}), None)
    with FakeTensorMode():
        calls = nearby(network.captured, ((torch.empty(2, 3, 12, 10, device="cuda:1"),), {}))
    assert [tuple(args[0].shape) for args, _ in calls] == [(1, 3, 12, 10), (2, 3, 13, 12), (2, 3, 44, 42)]
    assert {str(args[0].device) for args, _ in calls} == {"cuda:1"}


def test_other_sizes_that_cannot_be_made_do_not_end_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model, x = _small()
    monkeypatch.setattr(whole, "nearby", fails)
    fast = aerogel.compile(model, (x,), tune="off")
    assert "answers at other sizes were not compared with torch's: out of memory" in fast.notes
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


class Replaying(OpenCL):
    """A device whose calls share their inputs and outputs, as replays of one CUDA graph do. The first call
    waits a moment for another one to get in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Lock()
        self.second = threading.Event()

    def captured(self, run: Run) -> Run:
        buffers: list[Any] = []
        outputs: list[Any] = []

        def replay(inputs: list[Any]) -> list[Any]:
            buffers[:] = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
            if self.first.acquire(blocking=False):
                self.second.wait(0.5)
            else:
                self.second.set()
            outputs[:] = run(list(buffers))
            return [v.clone() for v in outputs]

        return replay


def test_calls_of_several_threads_do_not_overlap_on_a_device() -> None:
    model, x = _small()
    with using(OnGpu(Replaying())):
        fast = aerogel.compile(model, (x,), tune="off")
    fast.ready().device = device = Replaying()  # type: ignore[attr-defined]
    fast.ready().forget()
    images = [torch.randn(2, 3, 12, 10) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(fast, images))
    assert device.first.locked(), "a call went through it"
    for image, answer in zip(images, answers, strict=True):
        torch.testing.assert_close(answer, model(image).detach(), rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """A product, whose type autocast changes, before a convolution on a sparse kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.conv = nn.Conv2d(3, 40, 3, padding=1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.matmul(x, self.weight))  # type: ignore[no-any-return]


def test_a_device_computes_in_the_networks_types_under_autocast() -> None:
    model, x = Scaled().eval(), torch.randn(1, 3, 6, 6)
    with using(OnGpu(Quick())):
        fast = aerogel.compile(model, (x,), methods=SPARSE)
    assert [c.config.method in SPARSE for c in fast.plan.choices] == [True]
    with torch.autocast("cpu", torch.bfloat16):
        (answer,) = fast.ready()([x])
    torch.testing.assert_close(answer, model(x), rtol=1e-4, atol=1e-4)


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") does nothing without a GPU
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_of_the_modules_own_device_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _small()
    with using(OnGpu(OpenCL())):
        fast = aerogel.compile(model, (x,), tune="off")
    ran: list[object] = []

    def ready() -> Callable[[list[Any]], list[Any]]:
        ran.append("graph")
        return lambda inputs: inputs

    monkeypatch.setattr(fast, "ready", ready)
    with _cuda_autocast():
        fast(x)
        assert ran == ["graph"], "autocast on a GPU is nothing to a module on the CPU"
        monkeypatch.setattr(fast.backend, "device", "cuda:0")
        torch.testing.assert_close(fast(x), model(x).detach())  # a warning if it came to another program
    assert ran == ["graph"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_layer_converts_images_of_another_type(dtype: torch.dtype) -> None:
    conv, config = (
        Conv.parse("n1c3h8w8k8r3s3u1p1+add"),
        Config.parse("direct/filters=1,images=1,per=4,pixels=32,rows=1"),
    )
    weight, x, residual = torch.randn(8, 3, 3, 3), torch.randn(1, 3, 8, 8).to(dtype), torch.randn(1, 8, 8, 8)
    y = Layer(OpenCL(), conv, config, Weight(weight.numpy()))(x, None, residual.to(dtype))
    wanted = torch.conv2d(x.float(), weight, None, 1, 1) + residual.to(dtype).float()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


class Second(OpenCL):
    """A device that says that its tensors are on the second GPU."""

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        with FakeTensorMode():
            return torch.empty(tensor.shape, device="cuda:1")


def test_a_call_on_another_gpu_is_refused_in_words() -> None:
    model, x = _small()
    network, _ = network_of(model, ((x,), {}), None)
    with FakeTensorMode():
        first, second = (torch.empty(2, 3, 12, 10, device=f"cuda:{i}") for i in range(2))
    backend = OnGpu(Second())
    assert (backend.device, backend.device_type) == ("cuda:1", "cuda")
    assert network.captured.misfit([second], backend.device) is None
    assert network.captured.misfit([first], backend.device) == (
        "input 'x' is torch.float32 on cuda:0; the model was compiled for torch.float32 on cuda:1"
    )


def test_a_model_is_compiled_for_the_gpu_of_its_example() -> None:
    with FakeTensorMode():
        second = torch.empty(2, device="cuda:1")
    assert cuda_index(((1, torch.empty(2)), {"x": [second]})) == 1
    assert cuda_index(((torch.empty(2),), {})) is None


class Rejecting(Quick):
    """A device whose compiler fails on one method."""

    def kernel(self, code: Code) -> Any:
        if code.entry == "direct":
            raise RuntimeError("\nNVRTC: internal error\nat line 3")
        return super().kernel(code)


REASON = "does not run on this device: NVRTC: internal error"


def test_a_candidate_that_fails_is_refused_and_not_remembered(tmp_path: Path) -> None:
    model, x = _small()
    with using(OnGpu(Rejecting())):
        fast = aerogel.compile(model, (x,), methods=SPARSE, store=tmp_path)
    assert [c.config.method for c in fast.plan.choices[:2]] == ["stridepack", "stridepack"]
    assert REASON in str(aerogel.explain(fast, verbose=True))
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    with using(OnGpu(Quick())):
        healthy = aerogel.compile(model, (x,), methods=SPARSE, store=tmp_path)
    assert "direct" in {c.method for c in healthy.plan.choices[0].configs()}


def test_a_choice_by_rule_that_fails_becomes_torchs() -> None:
    model, x = _small()
    with using(OnGpu(Rejecting())), pytest.warns(UserWarning, match=REASON):
        fast = aerogel.compile(model, (x,), methods=("direct",), tune="off")
    assert {c.config.method for c in fast.plan.choices} == {"dense"}
    assert REASON in str(aerogel.explain(fast, verbose=True))
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_kernel_that_fails_at_another_size_is_torchs_there() -> None:
    model, x = _small()
    device = Quick()
    with using(OnGpu(device)):
        fast = aerogel.compile(model, (x,), methods=("direct",))
    device.kernel = Rejecting().kernel  # type: ignore[method-assign]
    other = torch.randn(1, 3, 17, 19)
    with pytest.warns(UserWarning, match=REASON):
        answer = fast(other)
    torch.testing.assert_close(answer, model(other).detach(), rtol=1e-4, atol=1e-5)


def test_tf32_is_read_whichever_interface_set_it() -> None:
    flags: Any = getattr(torch.backends.cudnn, "conv", None)
    if flags is None:
        pytest.skip("torch 2.9 added the newer interface")
    before = flags.fp32_precision
    assert cuda.allows_tf32()
    flags.fp32_precision = "ieee"
    try:
        assert not cuda.allows_tf32()
    finally:
        flags.fp32_precision = before


def test_machine_code_is_stored_by_the_compiler_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    installed, compiler_version = version("nvidia-cuda-nvrtc"), nvrtc.compiler_version.__wrapped__
    number, patch = compiler_version().split()
    assert installed == patch
    assert installed.startswith(f"{number}.")
    monkeypatch.setattr(nvrtc, "version", missing)
    assert compiler_version() == number
