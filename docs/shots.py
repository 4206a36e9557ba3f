"""Take the pictures of the docs with headless Chromium:

    sphinx-build -b html docs docs/_build && python docs/shots.py report.html docs/_build

The report at a desk, on a phone, in the dark and on paper goes to docs/_static/shots; the site's first page,
a method's page and the API's go to the site's folder `shots`. Fails where a page's console says an error.
Look at every one of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent / "_static" / "shots"
DESK, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}


def main(report: Path, site: Path) -> None:
    for folder in (OUT, site / "shots"):
        folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, Path, dict[str, Any], str]] = [
        ("report-desktop", report, {"viewport": DESK}, "screen"),
        ("report-phone", report, {"viewport": PHONE}, "screen"),
        ("report-dark", report, {"viewport": DESK, "color_scheme": "dark"}, "screen"),
        ("report-print", report, {"viewport": {"width": 794, "height": 1123}}, "print"),
        ("site-first", site / "index.html", {"viewport": DESK}, "screen"),
        ("site-phone", site / "index.html", {"viewport": PHONE}, "screen"),
        ("site-method", site / "methods" / "direct.html", {"viewport": DESK}, "screen"),
        ("site-api", site / "api.html", {"viewport": DESK}, "screen"),
    ]
    errors: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path, options, media in wanted:
            page = browser.new_page(**options)
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(path.absolute().as_uri())
            page.emulate_media(media=media)  # type: ignore[arg-type]
            page.wait_for_timeout(300)
            page.screenshot(path=(OUT if path == report else site / "shots") / f"{name}.png")
    if errors:
        sys.exit(f"a page's console says: {errors}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
