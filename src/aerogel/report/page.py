"""A report as one HTML page, and as the part of it that a notebook shows.

Everything is in the file: style, one small script (sorting and searching), charts as SVG. A policy in the
page's head allows that script alone, by its hash, and no network: a layer's name stays text, whatever it
holds.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from aerogel.errors import printable
from aerogel.ir import Conv, Target
from aerogel.methods import BASELINE
from aerogel.optional import install
from aerogel.report import charts
from aerogel.report.limits import Limit, limit, rates, target_here
from aerogel.report.report import LEGEND, Report, spent_us, times_of, whole_us

COLUMNS = (  # heading, class
    ("layer", "name"),
    ("problem", "wide problem"),
    ("zeros", "n"),
    ("method", ""),
    ("time, us", "n"),
    ("dense, us", "n"),
    ("times as fast", "n"),
    ("share", "n wide"),
    ("of the limit", "n wide"),
    ("beside dense", "bars wide"),
    ("why", ""),
)
BOUND = {"fma": "FMA", "l2": "L2", "l3": "L3"}


def _text(text: object) -> str:
    """Text of a file in HTML: neither tags nor characters that turn what follows around."""
    return html.escape(printable(text))


def _resource(name: str) -> str:
    return (files("aerogel.report") / name).read_text(encoding="utf-8")


def page(report: Report) -> str:
    """The whole page."""
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    found, why = _limits(report)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>aerogel report</title><style>{_resource('page.css')}</style>"
            "<noscript><style>dl[hidden] { display: grid }</style></noscript></head><body>",
            f"<header><h1>aerogel report</h1><p>{_text(report.headline)}</p>{_numbers(report)}</header>",
            "<main>",
            *_figures(report, found, why),
            _table(report, found),
            _list("Memory, counted", {k: f"{v / 2**20:.1f} MB" for k, v in report.memory.items()}),
            _notes(report.notes),
            _list("Machine and versions", report.machine),
            f"</main><script>{script}</script></body></html>",
        ]
    )


def fragment(report: Report) -> str:
    """What a notebook shows: the headline, the table and the notes, without a script."""
    return f"<div><p><b>{_text(report.headline)}</b></p>{_plain(report)}{_notes(report.notes)}</div>"


def _numbers(report: Report) -> str:
    sparse = sum(bool(row.get("skips_zeros")) for row in report.layers)
    dense = sum(row["method"] != BASELINE for row in report.layers) - sparse
    cards = [("layers on sparse kernels", f"{sparse} of {len(report.layers)}")]
    if dense > 0:
        cards.append(("layers on aerogel's dense-weight kernels", f"{dense} of {len(report.layers)}"))
    if report.by == "torch":
        cards = [("runs the model: nothing was faster", "torch")]
    elif report.times:
        ours, theirs = report.times["aerogel"], report.times["torch"]
        doubt = f", {report.doubt}" if report.doubt else ""
        cards = [
            (f"times as fast as torch{doubt}", report.speedup or f"{theirs / ours:.2f}x"),
            *((name, f"{ms:.1f} ms") for name, ms in report.times.items()),
            *cards,
        ]
    return '<ul class="numbers">' + "".join(f"<li><b>{v}</b>{_text(k)}</li>" for k, v in cards) + "</ul>"


def _limits(report: Report) -> tuple[list[Limit] | None, str]:
    """Each layer's, measured here; or None and why not."""
    if not any(spent_us(row) for row in report.layers):
        return None, "nothing was timed"
    here = target_here(report.machine.get("target", ""))
    if not isinstance(here, Target):
        return None, here
    measured = rates(here)
    return [limit(Conv.parse(row["conv"]), row["sparsity"], here, measured) for row in report.layers], ""


def _figures(report: Report, found: list[Limit] | None, why: str) -> list[str]:
    """The charts; a sentence where one cannot be drawn."""
    timed = [row for row in report.layers if spent_us(row) and row["dense_us"]]
    if not charts.can_draw():
        return [f'<p class="soft">Charts need matplotlib: <code>{_text(install("plot"))}</code>.</p>']
    drawn = []
    if timed:
        drawn.append(
            _figure("Time by layer", charts.by_layer(timed), "Grey: the fastest dense kernel, alone.")
        )
    if timed and report.by != "torch":
        words = "Everything else: copies, pooling, what torch runs, and the call itself."
        drawing = charts.by_method(timed, report.times.get("aerogel", 0.0))
        drawn.append(_figure("Where the time goes", drawing, words))
    if found is None:
        drawn.append(f'<h2>Share of the machine\'s limit</h2><p class="soft">Not drawn: {_text(why)}.</p>')
    else:
        target = Target.parse(report.machine["target"])
        drawing = charts.roofline(report.layers, found, rates(target), target.threads)
        words = "Lines: what this machine can do, measured when this page was made. Points: layers."
        drawn.append(_figure("Share of the machine's limit", drawing, words))
    if report.layers:
        drawn.append(_figure("Zeros by layer", charts.sparsity(report.layers), "Colours as above."))
    return drawn


def _figure(title: str, svg: str, caption: str) -> str:
    return f"<h2>{_text(title)}</h2><figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _table(report: Report, found: Sequence[Limit] | None) -> str:
    """Every layer, to sort and search."""
    heads = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{_text(name)}</button></th>'
        if name not in ("beside dense", "why")
        else f'<th scope="col" class="{kind}">{_text(name)}</th>'
        for name, kind in COLUMNS
    )
    longest = max((row["dense_us"] or 0.0 for row in report.layers), default=0.0)
    longest = max([longest, *(spent_us(row) or 0.0 for row in report.layers)])
    whole = whole_us(report.layers, report.times.get("aerogel"))
    body = "".join(
        _row(row, None if found is None else found[i], whole, longest) for i, row in enumerate(report.layers)
    )
    count = len(report.layers)
    return "\n".join(
        [
            '<h2 id="choices">Every choice and refusal</h2>',
            f'<p class="soft">{_text(LEGEND)}.</p>',
            '<p class="find"><label for="find">Show layers with </label>',
            '<input id="find" type="search" placeholder="a name, a method, a word">',
            f'<span id="found" role="status">{count} of {count} layers</span></p>',
            '<div class="scroll" tabindex="0" role="region" aria-labelledby="choices"><table id="layers">',
            "<caption>Times are medians: in the running network, or alone where that was not looked at; "
            "dense is alone. The limit is by multiply-adds (FMA) or by the bandwidth of a cache.</caption>",
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>",
        ]
    )


def _row(row: dict[str, Any], found: Limit | None, whole: float, longest: float) -> str:
    spent, dense = spent_us(row), row["dense_us"]
    reach = "" if found is None or not spent else f"{found.us / spent:.0%} ({BOUND[found.bound]})"
    cells = [
        f'<th scope="row" class="name">{_text(row["layer"])}</th>',
        f'<td class="wide problem"><code>{_text(row["conv"])}</code></td>',
        _cell(row["sparsity"], f"{row['sparsity']:.0%}"),
        f"<td>{_text(row['method'])}</td>",
        _cell(spent, f"{spent:.0f}" if spent else ""),
        _cell(dense, f"{dense:.0f}" if dense else ""),
        _cell(dense / spent, f"{dense / spent:.2f}x") if spent and dense else _cell(None, ""),
        _cell(spent / whole if spent else None, f"{spent / whole:.1%}" if spent else "", "n wide"),
        _cell(found.us / spent if found and spent else None, reach, "n wide"),
        f'<td class="bars wide">{_bar(spent, longest, "")}{_bar(dense, longest, " dense")}</td>',
        f'<td><button type="button" class="why" aria-expanded="false">details</button>{_why(row, True)}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: float | None, text: str, kind: str = "n") -> str:
    return f'<td class="{kind}" data-v="{"" if value is None else f"{value:.6g}"}">{text}</td>'


def _bar(us: float | None, longest: float, kind: str) -> str:
    return (
        f'<span class="bar{kind}" style="width:{100 * us / longest:.1f}%"></span>' if us and longest else ""
    )


def _why(row: dict[str, Any], hidden: bool = False) -> str:
    """What was chosen, in full, and every other method's reason; shown by the button before it. A <details>
    for each of thousands of rows would take the browser seconds."""
    lines = [("chosen", f"{row['chosen']}{times_of(row)}")]
    lines += [("zero are", row["idle"])] if row["idle"] else []
    lines += [(f"not {name}", why) for name, why in row["others"].items()]
    items = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in lines)
    return f"<dl{' hidden' if hidden else ''}>{items}</dl>"


def _plain(report: Report) -> str:
    """The table of a notebook."""
    whole = whole_us(report.layers, report.times.get("aerogel"))
    head = "".join(f"<th>{_text(name)}</th>" for name, _ in COLUMNS[:8])
    body = []
    for row in report.layers:
        spent, dense = spent_us(row), row["dense_us"]
        cells = [row["layer"], row["conv"], f"{row['sparsity']:.0%}", row["method"]]
        cells += [f"{spent:.0f}" if spent else "", f"{dense:.0f}" if dense else ""]
        cells.append(f"{dense / spent:.2f}x" if spent and dense else "")
        cells.append(f"{spent / whole:.1%}" if spent else "")
        why = f"<details><summary>why</summary>{_why(row)}</details>"
        body.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}<td>{why}</td></tr>")
    return f"<table><tr>{head}<th>why</th></tr>{''.join(body)}</table>"


def _list(title: str, rows: Any) -> str:
    items = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in rows.items())
    return f"<h2>{_text(title)}</h2><dl>{items}</dl>" if items else ""


def _notes(notes: Sequence[str]) -> str:
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{_text(n)}</li>" for n in notes) + "</ul>" if notes else ""
