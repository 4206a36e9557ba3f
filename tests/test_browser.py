"""The report in a real browser: nothing of a model's names runs, no error, sorted and searched by keyboard,
and what axe-core finds wrong for people who cannot see it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_report import SCRIPT, report, row

pytest.importorskip("playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
MAX_NODES_OF_A_LAYER = 30  # 22 when this was written


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def shown(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """A page, and what its console says that is an error."""
    page = browser.new_page(**options)
    page.set_default_timeout(300_000)  # of a browser that hangs; a busy machine may take a minute
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith("file:") else None)
    page.goto(path.as_uri())
    return page, said


def test_a_name_runs_no_script(browser: Any, tmp_path: Path) -> None:
    names = [SCRIPT, "<svg onload=document.title=1>", "javascript:document.title=1", "'\"><b>"]
    made = report(*[row(name, others={name: name}, chosen=name, idle=name) for name in names])
    page, said = shown(browser, made.save(tmp_path / "report.html"))
    page.wait_for_timeout(300)
    assert page.title() == "aerogel report"
    assert page.locator("main img").count() == 0
    assert not said
    (tmp_path / "part.html").write_text(f"<meta charset=utf-8><title>x</title>{made._repr_html_()}")
    page, _ = shown(browser, tmp_path / "part.html")
    page.wait_for_timeout(300)
    assert page.title() == "x"


def test_the_table_is_sorted_and_searched_by_keyboard(browser: Any, tmp_path: Path) -> None:
    made = report(row("b", us=9.0), row("a", us=100.0), row("c10", us=20.0), row("c9", us=30.0))
    page, said = shown(browser, made.save(tmp_path / "report.html"))

    def names() -> list[str]:
        return list(page.locator("#layers tbody tr:visible th").all_inner_texts())

    page.get_by_role("button", name="layer").focus()
    page.keyboard.press("Enter")
    assert names() == ["a", "b", "c9", "c10"]
    page.get_by_role("button", name="time, us").focus()
    page.keyboard.press("Enter")
    assert names() == ["b", "c10", "c9", "a"]
    page.keyboard.press("Enter")
    assert names() == ["a", "c9", "c10", "b"]
    assert page.locator("th[aria-sort=descending]").inner_text() == "time, us"
    page.get_by_label("Show layers with").fill("c10")
    assert names() == ["c10"]
    assert page.locator("#found").inner_text() == "1 of 4 layers"
    page.locator("button.why:visible").focus()
    page.keyboard.press("Enter")
    assert "not dense" in page.locator("#layers tbody tr:visible").inner_text()
    assert page.locator("button.why[aria-expanded=true]").count() == 1
    assert not said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, tmp_path: Path, scheme: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, said = shown(
        browser, report(row("a"), row("b")).save(tmp_path / "report.html"), color_scheme=scheme
    )
    found = axe.Axe().run(page).response["violations"]
    assert not found, [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found]
    assert not said


def test_a_phone_need_not_scroll_sideways(browser: Any, tmp_path: Path) -> None:
    made = report(*[row(f"layer{i}.0.conv{i}") for i in range(30)])
    page, _ = shown(browser, made.save(tmp_path / "report.html"), viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_thousands_of_layers_open_at_once(browser: Any, tmp_path: Path) -> None:
    """What a browser has to lay out grows with the number of layers, by few nodes for each."""
    nodes = []
    for layers in (500, 1000, 2000):
        made = report(*[row(f"stage{i}.block.conv", us=10.0 + i % 7) for i in range(layers)])
        page, said = shown(browser, made.save(tmp_path / "report.html"))
        assert page.locator("#layers tbody tr").count() == layers
        assert not said
        nodes.append(page.evaluate("document.querySelectorAll('*').length"))
    a_layer = (nodes[1] - nodes[0]) / 500
    assert a_layer <= MAX_NODES_OF_A_LAYER
    assert (nodes[2] - nodes[1]) / 1000 <= 1.05 * a_layer
