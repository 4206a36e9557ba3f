"""dense: right with torch's private ops and without each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aerogel.errors import InvalidFile
from aerogel.ir import Config, Conv, Packed, Stats, host
from aerogel.ir.tensors import private_ops
from aerogel.methods.dense import cpu as dense
from aerogel.reference import reference
from tests.conftest import Hidden
from tests.suite.cases import case
from tests.suite.sweep import sweep

ANY = Stats(1, 1)


def test_prepacked_channels_last_is_tried_first() -> None:
    configs = list(dense.configs(Conv.parse("n1c3h8w8k4r3s3u1p1"), host(), ANY))
    if private_ops() is None:
        pytest.skip("this torch has no prepacked form")
    assert len(configs) == 4
    assert configs[0] == Config.make("dense", channels_last=1, prepacked=1)


@pytest.mark.parametrize("missing", ["mkldnn_reorder_conv2d_weight", "_convolution_pointwise", "oneDNN"])
def test_without_a_private_op_the_plain_form_remains(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "oneDNN":
        monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    elif missing.startswith("_"):
        monkeypatch.setattr(torch.ops, "mkldnn", Hidden(torch.ops.mkldnn, missing))
    else:
        monkeypatch.setattr(torch._C, "_nn", Hidden(torch._C._nn, missing))
    configs = list(dense.configs(Conv.parse("n1c3h8w8k4r3s3u1p1"), host(), ANY))
    assert {c["prepacked"] for c in configs} == {0}
    done = sweep("dense", "exact", range(200))
    assert done.ran == 200
    assert not done.failures


@pytest.mark.parametrize("pad", ["2x0x2x1", "2x1"])
def test_one_channel_with_a_stride_across_columns_only(pad: str) -> None:
    """oneDNN misreads it in channels_last; whatever is offered must not."""
    conv = Conv.parse(f"n2c1h9w3k1r3s3u1x2p{pad}+relu")
    random = np.random.default_rng(0)
    x, weight = (random.integers(-8, 9, s).astype(np.float32) for s in (conv.x_shape, conv.weight_shape))
    wanted = reference(x.astype(np.float64), weight.astype(np.float64), conv)
    for config in dense.configs(conv, host(), ANY):
        packed = dense.pack(weight, conv, config)
        made = dense.build(packed, conv, config, host(), *dense.layouts(conv, config, host()))
        buffer = np.zeros(made.reads.elements(x.shape), np.float32)
        made.reads.write(buffer, x)
        got = made.call(torch.from_numpy(made.reads.view(buffer, x.shape)), None, None)
        assert np.array_equal(got.numpy(), wanted), config


def test_dense_within_the_bound_on_real_numbers() -> None:
    done = sweep("dense", "real", range(400))
    assert not done.failures, done.failures


def test_refusals_are_sentences() -> None:
    assert "one element type" in str(dense.refuse(Conv.parse("c3k4r1s1u1p0:f16.f32.f32.f32"), host(), ANY))
    assert "empty batch" in str(dense.refuse(Conv.parse("n0c3h4w4k4r1s1u1p0"), host(), ANY))


def test_a_foreign_weight_is_refused() -> None:
    one = case("exact", 0)
    good = dense.pack(one.weight, one.conv, Config.make("dense"))
    assert dense.unpack(good, one.conv) is one.weight
    for bad in (
        Packed("direct", 1, good.arrays),
        Packed("dense", 1, {}),
        Packed("dense", 1, {"weight": one.weight[:0]}),
    ):
        with pytest.raises(InvalidFile):
            dense.unpack(bad, one.conv)


def test_a_private_operator_that_fails_gives_way_to_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 with an add and a ReLU is an internal error of torch's on some CPUs."""

    class Broken:
        def __call__(self, *_: object) -> object:
            raise RuntimeError("INTERNAL ASSERT FAILED")

        binary = __call__

    reorder, _ = private_ops() or (lambda *_: None, None)
    monkeypatch.setattr(dense, "private_ops", lambda dtype="f32": (reorder, Broken()))
    conv = Conv(4, 4, 3, 3, pad=(1, 1, 1, 1), epilogue=("bias", "add", "relu")).at(1, 8, 8)
    weight = np.ones(conv.weight_shape, np.float32)
    config = Config.make("dense", channels_last=1, prepacked=1)
    reads, writes = dense.layouts(conv, config, host())
    kernel = dense.build(dense.pack(weight, conv, config), conv, config, host(), reads, writes)
    x, bias, residual = torch.randn(1, 4, 8, 8), torch.randn(4), torch.randn(1, 4, 8, 8)
    wanted = torch.relu(torch.conv2d(x, torch.from_numpy(weight), bias, padding=1) + residual)
    for _ in range(2):
        assert torch.allclose(kernel.call(x, bias, residual), wanted, atol=1e-5)


@pytest.mark.parametrize("text", ["n2c1h13w5k7r1s5u1x2p0", "n1c1h9w2k3r5s2u1x3p0", "n1c1h5w3k16r1s3u1x2p0"])
def test_one_channel_and_one_column(text: str) -> None:
    """oneDNN reads other pixels there: prepacked is then torch's plain convolution."""
    conv = Conv.parse(text)
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (conv.weight_shape, conv.x_shape))
    for config in dense.configs(conv, host(), Stats.of(weight)):
        layouts = dense.layouts(conv, config, host())
        call = dense.build(dense.pack(weight, conv, config), conv, config, host(), *layouts)
        given = torch.from_numpy(x).contiguous(memory_format=torch.channels_last)
        wanted = F.conv2d(torch.from_numpy(x).double(), torch.from_numpy(weight).double(), None, conv.stride)
        assert torch.equal(call.call(given, None, None).double(), wanted), config
