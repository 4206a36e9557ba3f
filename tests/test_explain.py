"""explain(): the headline gives the true reason, and nothing that a file says is obeyed by a terminal or a
browser."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel.ir import EAGER, GRAPH, Choice, Config, Conv, Plan, Timing, Tried, host
from aerogel.report.report import Report
from aerogel.runtime.module import Compiled

X = torch.randn(1, 4, 12, 12)
ENOUGH = "sparse enough"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


def headline(model: nn.Module, x: Any = X, **options: Any) -> str:
    return aerogel.explain(aerogel.compile(model.eval(), x, **{"tune": "off", **options})).headline


def test_float64() -> None:
    with pytest.warns(UserWarning, match=r"float64.*Call \.float\(\)"):
        said = headline(net().double(), X.double())
    assert (
        "weights are torch.float64, and kernels of ours take float32, float16 and bfloat16 (all layers)"
        in said
    )
    assert ENOUGH not in said
    with pytest.warns(UserWarning, match="float64"):
        assert "torch.float64" in headline(nn.Linear(4, 4).double(), torch.zeros(1, 4).double())


def test_three_dimensions() -> None:
    said = headline(
        nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3)), torch.zeros(1, 4, 6, 6, 6)
    )
    assert "conv3d has no sparse kernel (all layers)" in said
    assert ENOUGH not in said


class Sequence(nn.Module):
    """Linears over a sequence, and one over features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.second(self.first(x)).mean(1))


def test_the_commonest_reason_is_said() -> None:
    assert "a Linear over more than features (batch, features) is torch's (2 of 3 layers)" in headline(
        Sequence(), torch.zeros(1, 5, 8)
    )


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, 1, 1))

    def forward(self, x: Any) -> Any:
        return nn.functional.conv2d(x, self.weight * x.mean())


def test_weights_that_are_computed() -> None:
    assert "weights are computed while the model runs" in headline(Computed())


@pytest.mark.filterwarnings("ignore")  # torch's own on its quantised modules
def test_quantised() -> None:
    quantised = torch.ao.nn.quantized
    model = nn.Sequential(
        quantised.Quantize(0.1, 0, torch.quint8),  # type: ignore[no-untyped-call]
        quantised.Conv2d(4, 8, 3),  # type: ignore[no-untyped-call]
        quantised.DeQuantize(),
    )
    said = headline(model)
    assert "The model is quantised" in said
    assert ENOUGH not in said


@pytest.mark.parametrize("options", [{"methods": ("dense",)}, {"strict_nan": True}])
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_restricted(options: dict[str, Any], tune: str) -> None:
    said = headline(aerogel.prune(net(), 0.9), tune=tune, **options)
    assert "only dense was asked for (methods= or strict_nan=True) (all layers)" in said
    assert ENOUGH not in said


def test_a_method_that_refuses() -> None:
    """Asked for one method, which refuses: its words are the reason."""
    said = headline(aerogel.prune(net(), 0.9), methods=("tilewise",))
    assert "of its nonzeros stand where neighbouring filters have theirs" in said
    assert ENOUGH not in said


def test_where_sparsity_is_the_reason_it_is_said() -> None:
    assert ENOUGH in headline(net())


def test_nothing_to_speed_up() -> None:
    said = headline(nn.ReLU())
    assert said.endswith("There is no convolution or Linear to speed up.")
    assert "0 of 0" not in said


def _timed(sparsity: float, dense_us: float, direct_us: float) -> Choice:
    dense, direct = Config.make("dense"), Config.make("direct")
    timings = Timing.of([dense_us], [dense_us]), Timing.of([direct_us], [dense_us])
    tried = Tried(dense, timings[0]), Tried(direct, timings[1])
    return Choice("a", "a", Conv(4, 4), dense, sparsity=sparsity, tried=tried)


@pytest.mark.parametrize(
    ("sparsity", "says"), [(0.2, ENOUGH), (0.95, "dense kernels were faster at these sizes")]
)
def test_what_was_timed_and_lost(sparsity: float, says: str) -> None:
    plan = Plan(host(), (_timed(sparsity, 10, 20),), Timing.of([1.0], [1.0]))
    assert says in aerogel.explain(Compiled(net(), None, plan, EAGER)).headline


def test_a_configuration_timed_in_the_network_only_says_so() -> None:
    """The cost model's contenders are not timed alone."""
    choice = replace(_timed(0.9, 90, 20), config=Config.make("direct", vectors=7))
    choice = replace(choice, in_network=Timing.of([12.0], [15.0]))
    plan = Plan(host(), (choice,), Timing.of([1.0], [1.0]))
    said = str(aerogel.explain(Compiled(net(), None, plan, EAGER), verbose=True))
    assert "12 us in the network, dense 90 us alone" in said


def test_answers_that_differed_are_not_called_slow() -> None:
    plan = Plan(host(), (_timed(0.9, 10, 20),), differed="its answers differed from torch's on the example")
    said = aerogel.explain(Compiled(net(), None, plan, EAGER)).headline
    assert "answers differed" in said
    assert "faster" not in said


def test_a_speedup_is_only_said_where_one_was_timed(small: Any) -> None:
    _, fast, _ = small
    assert fast.plan.model is None
    assert "x over" not in aerogel.explain(fast).headline
    timed = Compiled(fast.original, fast.network, replace(fast.plan, model=Timing.of([1.0], [2.0])), GRAPH)
    assert aerogel.explain(timed).headline.startswith("2.00x over the faster torch layout; ")


def test_a_layer_that_is_not_there(small: Any) -> None:
    with pytest.raises(aerogel.AerogelError, match=r"no layer is called 'haed'; did you mean 'head'\?"):
        aerogel.explain(small[1], layer="haed")
    with pytest.raises(aerogel.AerogelError, match="layers are "):
        aerogel.explain(small[1], layer="\x1b")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.seen.add(tag)


TAGS = {"div", "h2", "p", "b", "table", "tr", "th", "td", "ul", "li", "details", "summary", "dl", "dt", "dd"}
HOSTILE = "\x1b[31mred[/]<script>\u202e\x07\r\n\x9b"


def tags(report: Report) -> set[str]:
    parser = Tags()
    parser.feed(report._repr_html_())
    return parser.seen


def test_names_of_layers_are_shown_and_not_obeyed() -> None:
    model = nn.Sequential(OrderedDict({HOSTILE: nn.Conv2d(4, 8, 3), "b": nn.Conv2d(8, 8, 3)})).eval()
    report = aerogel.explain(aerogel.compile(model, X, tune="off"))
    assert all(line.isprintable() for line in str(report).split("\n"))
    assert "[31mred[/]<script>" in str(report)
    assert tags(report) <= TAGS


def test_every_field_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = {
        "layer": HOSTILE,
        "conv": HOSTILE,
        "sparsity": 0.5,
        "method": HOSTILE,
        "chosen": HOSTILE,
        "idle": HOSTILE,
        "us": 1.0,
        "dense_us": 2.0,
    }
    row |= {"in_network_us": None, "others": {HOSTILE: HOSTILE}}
    report = Report(HOSTILE, (row,), (HOSTILE,))
    for verbose in (False, True):
        said = str(replace(report, verbose=verbose)).split("\n")
        assert all(line.isprintable() for line in said)
        assert len(said) in (7, 8), "a name makes no line of its own"
    assert tags(report) <= TAGS
    assert report._repr_html_().isprintable()
    assert report.to_dict()["layers"][0]["layer"] == HOSTILE, "what a program reads is as it was"
