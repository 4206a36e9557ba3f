"""The report stays within its page, on a desk and on a phone, with details open and closed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.test_report import report, row

pytest.importorskip("playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
NAMES = ("stem.0", "layer3.22.bottleneck.conv2", "backbone.features.denseblock3.denselayer24.conv2")
PROBLEMS = ("n1c3h224w224k64r7s7u2p3+bias+relu", "n16c1024h14w14k2048r1s1u2p0g32+bias+add+hardswish")
REASON = (
    "1516 us (blockgemm/ahead=4,channels=3,filters=5,groups=1,rows=64,vectors=10,width=5), direct 1294 us"
)
WIDTHS = """() => [document.querySelector("#layers").offsetWidth,
  document.querySelector(".scroll").clientWidth, document.documentElement.scrollWidth]"""


def test_the_report_fits_its_page(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    rows = [
        row(NAMES[i % 3], us=12345.0 + i, dense=54321.0, conv=PROBLEMS[i % 2], method="semistructured",
            others={"blockgemm": REASON, "dense": REASON})
        for i in range(12)
    ]  # fmt: skip
    path = report(*rows).save(tmp_path / "report.html")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1400, 1200, 1000, 768, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(path.as_uri())
            for opened in (False, True):
                if opened:
                    page.locator("button.why").nth(2).click()
                table, room, whole = page.evaluate(WIDTHS)
                assert table <= room, f"at {width} pixels the table takes {table} of {room}"
                assert whole <= width
            details = page.locator("#layers dl:visible").bounding_box()
            button = page.locator("button.why").nth(2).bounding_box()
            name = page.locator("#layers tbody th").nth(2)
            text = name.evaluate("e => { const r = document.createRange(); r.selectNodeContents(e);"
                                 " return r.getBoundingClientRect().bottom }")  # fmt: skip
            assert details is not None
            assert button is not None
            assert details["width"] >= 0.95 * room, "details take the whole width of the table"
            assert details["y"] >= max(text, button["y"] + button["height"]) - 1, (
                "and cover nothing of the row"
            )
        browser.close()
