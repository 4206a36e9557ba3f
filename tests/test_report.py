"""The report: a table first, a page that holds everything and runs nothing of the model's."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel.ir import Conv, host
from aerogel.report import charts
from aerogel.report.limits import limit
from aerogel.report.report import Report
from tests.test_explain import HOSTILE

SCRIPT = '</script><img src=x onerror="document.title=1">'


def row(layer: str, us: float | None = 50.0, dense: float | None = 200.0, **more: Any) -> dict[str, Any]:
    return {
        "layer": layer, "conv": "n1c16h14w14k16r3s3u1p1+bias+relu", "sparsity": 0.9, "method": "direct",
        "chosen": "direct/vectors=4 (Escort)", "idle": "", "lost": None, "us": us, "dense_us": dense,
        "in_network_us": None, "others": {"dense": "200 us, direct 50 us"},
    } | more  # fmt: skip


def report(*rows: dict[str, Any]) -> Report:
    return Report(
        "4.00x over the faster torch layout.",
        rows,
        ("a note",),
        {"aerogel": 0.2, "torch": 0.8},
        {"dense weights": 2.0**20},
        {"target": str(replace(host(), threads=1))},
    )


def test_the_summary_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = report(row("stem"), row("a" * 60, in_network_us=100.0), row("later", us=None, dense=None))
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(made).splitlines()
        assert max(map(len, lines[: lines.index("", 2)])) <= columns
        assert ("c16h14w14" in str(made)) == (columns == 120)
        assert ("c channels in" in str(made)) == (columns == 120), "a legend where there are problems"
        assert re.search(r"stem .*direct +50 +200 +4.00x +25%", str(made))
        assert re.search(r"…a+ .*direct +100 +200 +2.00x +50%", str(made)), (
            "in the network, where it was looked at"
        )
        assert re.search(r"all else +50 +25%", str(made))
    assert "not dense" not in str(made)
    assert "not dense: 200 us" in str(replace(made, verbose=True))


def test_it_is_short_to_look_at(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    fast = aerogel.compile(model, torch.randn(1, 4, 12, 12), tune="off")
    assert repr(fast).startswith("Compiled(Sequential, not timed, 0 of 1 layers on sparse kernels, cpu-")
    assert repr(aerogel.explain(fast)).startswith("<aerogel.Report, 1 layers: ")
    assert "\n" not in repr(fast) + repr(aerogel.explain(fast))
    assert sorted(dir(aerogel)) == sorted(aerogel.__all__)
    assert aerogel.explain(fast, layer="0").verbose


class Page(HTMLParser):
    """Tags of a page that could run or load something, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


@pytest.mark.parametrize("name", [SCRIPT, HOSTILE, "a$\\frac{b}$", "-->", "日本語"])
def test_a_name_stays_text(name: str, tmp_path: Path) -> None:
    made = report(row(name, conv="n1c16h14w14k16r3s3u1p1", others={name: name}, chosen=name, idle=name))
    made = replace(made, headline=name, notes=(name,))
    text = made.save(tmp_path / "report.html").read_text()
    page = parsed(text)
    assert page.tags.count("script") == 1, "the page's own"
    assert "img" not in page.tags
    assert not [a for a in page.attributes if a.startswith("on")]
    assert parsed(made._repr_html_()).tags.count("script") == 0
    if name == SCRIPT:
        assert page.text.count(SCRIPT) >= 5


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = report(row("stem"), row("body")).save(tmp_path / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)""", re.sub(r'xlink:href="#', "", text)), "nothing is loaded"
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    for words in (
        "4.00x",
        "Time by layer",
        "Where the time goes",
        "Zeros by layer",
        "of the limit",
        "a note",
    ):
        assert words in text
    assert text.count('role="img"') == 4, "every chart has a name"


def test_without_matplotlib_it_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    text = report(row("stem")).save(tmp_path / "report.html").read_text()
    assert "pip install &quot;aerogel[plot]&quot;" in text
    assert "stem" in text


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    other = replace(report(row("stem")), machine={"target": "cuda-sm_90-p132-s232448"})
    assert "limits are measured on CPUs only" in other.save(tmp_path / "a.html").read_text()
    empty = replace(report(), times={})
    assert "nothing was timed" in empty.save(tmp_path / "b.html").read_text()


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(aerogel.AerogelError, match=r"must end in \.html or \.htm"):
        report().save(tmp_path / "report.pdf")
    with pytest.raises(aerogel.AerogelError, match="cannot be written"):
        report().save(tmp_path / "none" / "report.html")


def test_where_torch_runs_the_model_its_page_says_so(tmp_path: Path) -> None:
    made = report(row("stem"))
    for by, card, parts in (
        ("graph", "times as fast as torch", True),
        ("torch", "nothing was faster", False),
    ):
        replace(made, by=by).save(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert card in page
        assert ("Where the time goes" in page) == parts, "the kernels' shares are of a run there was not"


def test_thousands_of_layers_fit(tmp_path: Path) -> None:
    rows = [row(f"stage{i}.block.conv", us=10.0 + i % 7) for i in range(2000)]
    assert report(*rows).save(tmp_path / "report.html").stat().st_size < 10e6


def test_a_limit_is_the_larger_of_work_and_traffic() -> None:
    conv, target = (
        Conv.parse("n1c64h56w56k64r3s3u1p1+bias+relu"),
        replace(host(), threads=1, l2_bytes=1 << 20),
    )
    slow_memory = limit(conv, 0.9, target, {"fma": 1e12, "l2": 1e9, "l3": 1e9})
    moved = 2 * 4 * 64 * 56 * 56 + 0.1 * 64 * 64 * 9 * 8
    assert slow_memory.bound == "l3"
    assert slow_memory.us == pytest.approx(moved / 1e9 * 1e6)
    slow_core = limit(conv, 0.9, target, {"fma": 1e9, "l2": 1e12, "l3": 1e12})
    assert slow_core.bound == "fma"
    assert slow_core.us == pytest.approx(2 * 0.1 * 64 * 64 * 9 * 56 * 56 / 1e9 * 1e6)
    both = limit(conv, 0.9, replace(target, threads=2), {"fma": 1e9, "l2": 1e12, "l3": 1e12})
    assert both.us == pytest.approx(slow_core.us / 2)
