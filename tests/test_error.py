"""What half precision costs a layer (tune/error.py), and one run of a configuration that tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aerogel.backends.cpu.backend import Cpu
from aerogel.backends.cpu.trial import output
from aerogel.ir import (
    NUMPY,
    Choice,
    Config,
    Conv,
    Dtypes,
    Node,
    Ref,
    Timing,
    Tried,
    Weight,
    from_float64,
    host,
    to_float64,
)
from aerogel.reference import reference
from aerogel.tune.error import accurate


def _choice(*configs: Config) -> tuple[Choice, Node, Any, dict[str, Tensor]]:
    """A layer whose long rows lose much when they are summed in fp16: large sums of one sign that the other
    half of the row cancels."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 512, 1, 1).sort(1).values, torch.rand(1, 512, 6, 6) + 1
    weight -= weight.mean(1, keepdim=True)
    node = Node("y", "conv", (Ref("x"), Ref("w")), {}, Conv(512, 8), "layer")
    conv = Conv(512, 8, dtypes=Dtypes("f16", "f16", "f16", "f16"), n=1, h=6, w=6)
    tried = tuple(
        Tried(config, Timing(1.0 + i, 1.0 + i, 1.0 + i, 9, 1.5, 1.5)) for i, config in enumerate(configs)
    )
    values = {"x": x, "w": weight, "y": F.conv2d(x, weight)}
    return Choice("layer", "y", conv, configs[0], tried=tried), node, Weight(weight.half().numpy()), values


@pytest.mark.skipif("avx512fp16" not in host().extras, reason="sums in fp16 need its arithmetic")
def test_rows_too_long_for_fp16_lose_their_place() -> None:
    long, short = (
        Config.make("direct", vectors=1, channels=c, groups=1, ahead=0, aligned=0) for c in (512, 8)
    )
    dense = Config.make("dense", channels_last=0, prepacked=0)
    choice, node, weight, values = _choice(long, short, dense)
    kept = accurate(Cpu(host()), choice, node, weight, [values])
    assert kept is not None
    assert kept.config == short
    assert list(kept.configs()) == [short, dense]
    assert any("dense bf16" in why for name, why in kept.refused if name == "direct")
    wild = {**values, "x": values["x"] * 1e5, "y": values["y"] * 1e5}
    # x itself is beyond fp16
    assert accurate(Cpu(host()), choice, node, weight, [values, wild]) is None


def test_one_run_of_a_configuration_is_the_layer() -> None:
    rng = np.random.default_rng(0)
    for text in ("n1c8h9w9k6r3s3u1p1:bf16+bias+add+relu", "n2c8h9w9k6r3s3u2p1:bf16+bias"):
        conv = Conv.parse(text)
        weight, x, beside = (
            rng.integers(-2, 3, s).astype(np.float64) for s in (conv.weight_shape, conv.x_shape, conv.y_shape)
        )
        bias, residual = torch.randint(-3, 3, (conv.k,)).float(), torch.from_numpy(beside).float()
        for config in (
            Config.make("direct", vectors=2, channels=4, groups=2, ahead=0, aligned=0),
            Config.make("dense", channels_last=1, prepacked=0),
        ):
            got = output(
                host(),
                conv,
                config,
                Weight(from_float64(weight, "bf16")),
                x.astype(np.float32),
                bias,
                residual,
            )
            wanted = reference(x, weight, conv, bias.double().numpy(), beside)
            assert np.array_equal(got, to_float64(from_float64(wanted, "bf16"), "bf16"))
    assert NUMPY["bf16"] == np.uint16
