"""A comparison as a web page: one file with everything in it, without scripts."""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lightning_bwdopt import plots, units
from lightning_bwdopt.callbacks import MODES
from lightning_bwdopt.compared_run import timeline_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_bwdopt.comparison import Comparison

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b2733; background: #f5f7f9; margin: 0; }
main { max-width: 68rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.facts { color: #5a6b7b; margin: 0 0 1.25rem; }
.verdict { border-radius: .5rem; padding: 1rem 1.25rem; font-size: 1.15rem; font-weight: 600; }
.equal { background: #e2f3e5; border: 1px solid #7dbb88; }
.cause { margin: .75rem 1.25rem 0; }
.broken { background: #fbe4e1; border: 1px solid #d98479; }
.tiles { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin-top: 1rem; }
.tile, figure, table { background: #fff; border: 1px solid #dde4ea; border-radius: .5rem; }
.tile { padding: .8rem 1.25rem; }
.tile strong { display: block; font-size: 1.6rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .45rem 1rem; text-align: right; border-top: 1px solid #eef2f5; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
tr:first-child > * { border-top: 0; }
thead th { color: #5a6b7b; font-weight: 600; }
figure { margin: 0; padding: .5rem; }
img { width: 100%; display: block; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.note { color: #5a6b7b; font-size: .9rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
@media (max-width: 46rem) { .pair, .tiles { grid-template-columns: 1fr; } }
"""


def page(result: Comparison, args: Sequence[str]) -> str:
    """The page.

    Args:
        result: What it shows.
        args: The arguments of ``fit`` that both runs had.
    """
    facts = result.ordinary.facts
    parts = [
        "<h1>The optimizer in backward, beside the ordinary run</h1>",
        f'<p class="facts">{escape(_facts(facts))}<br><code>{escape(shlex.join(args))}</code></p>',
        f'<div class="verdict {"equal" if result.parity else "broken"}">{_marked(result.verdict())}</div>',
        *(f'<p class="cause">Likely cause: {_marked(cause)}</p>' for cause in result.likely_causes()),
        '<div class="tiles">',
        _tile(_saving(result), memory_in_words(result)),
        _tile(f"{result.time_ratio:.2f} x the time", time_in_words(result)),
        "</div>",
        "<h2>Figures</h2>",
        _table(result),
        "<h2>Loss and time of each step</h2>",
        '<div class="pair">',
    ]
    for name, values in result.ordinary.losses.items():
        other = result.in_backward.losses.get(name, [])
        parts.append(_picture(plots.draw_curves(values, other, name, from_zero=False), f"{name} of both runs"))
    seconds = plots.draw_curves(result.ordinary.seconds, result.in_backward.seconds, "seconds", from_zero=True)
    parts += [_picture(seconds, "seconds of each step of both runs"), "</div>"]
    timelines = {
        f"{mode}, step {timeline_step(result.wanted) + 1}, rank 0": run.timeline
        for mode, run in zip(MODES, (result.ordinary, result.in_backward), strict=True)
        if run.timeline
    }
    if timelines:
        memory = "allocated on the GPU" if facts["device"] == "cuda" else "resident set"
        figures = plots.draw_timelines(timelines, memory)
        pictures = (_picture(f, f"memory, {title}") for title, f in zip(timelines, figures, strict=True))
        parts += ["<h2>Memory over one step</h2>", '<div class="pair">', *pictures, "</div>"]
    parts.append(f'<p class="note">{escape(_note(facts))}</p>')
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{'Equal' if result.parity else 'Parity is broken'}: the optimizer in backward</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def memory_in_words(result: Comparison) -> str:
    """The peaks of the fullest ranks."""
    ordinary, in_backward = (max(run.peak_mib) for run in (result.ordinary, result.in_backward))
    less = f"{abs(result.saved_mib):.1f} MiB {'less' if result.saved_mib >= 0 else 'more'}"
    return f"{ordinary:.1f} MiB ordinarily, {in_backward:.1f} MiB in backward on the fullest rank: {less}"


def time_in_words(result: Comparison) -> str:
    """The medians of the steps."""
    ordinary, in_backward = result.step_seconds
    return (
        f"The median step takes {ordinary:.3f} s ordinarily and {in_backward:.3f} s in backward:"
        f" {result.time_ratio:.2f} times as long."
    )


def _marked(text: str) -> str:
    """A message for the terminal as HTML, with its backticks as code."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text))


def _saving(result: Comparison) -> str:
    return f"{abs(result.saved_mib):.1f} MiB {'saved' if result.saved_mib >= 0 else 'more'}"


def _facts(facts: dict[str, Any]) -> str:
    ranks = facts["world_size"]
    return (
        f"{facts['model']}, {units.in_words(facts['parameters'])} parameters, {facts['precision']}; {facts['strategy']}"
        f" on {ranks} rank{'s' * (ranks > 1)}, {facts['device']}"
    )


def _note(facts: dict[str, Any]) -> str:
    memory = (
        "Memory is what torch's allocator has given out."
        if facts["device"] == "cuda"
        else "Memory is the resident set of each process, Python included; the allocator is set to give it back as it"
        " is freed, which costs both runs time."
    )
    return (
        "Each run has fresh processes and the same seed. Differences are the largest between corresponding numbers, of"
        f" every rank. Times leave out the first step and the one whose memory is shown. {memory}"
    )


def _tile(figure: str, words: str) -> str:
    return f'<div class="tile"><strong>{escape(figure)}</strong>{escape(words)}</div>'


def _table(result: Comparison) -> str:
    ordinary, in_backward = result.step_seconds
    rows = [
        ("peak memory of rank " + str(rank), f"{a:.1f} MiB", f"{b:.1f} MiB", f"{b - a:+.1f} MiB")
        for rank, (a, b) in enumerate(zip(result.ordinary.peak_mib, result.in_backward.peak_mib))
    ]
    rows.append(("median step", f"{ordinary:.3f} s", f"{in_backward:.3f} s", f"{result.time_ratio:.2f} x the ordinary"))
    for name, values in result.ordinary.losses.items():
        last = [run.losses.get(name, [float("nan")])[-1] for run in (result.ordinary, result.in_backward)]
        rows.append((f"last {name}", f"{last[0]:.6g}", f"{last[1]:.6g}", f"{last[1] - last[0]:.3g}"))
    for part, difference in result.differences.items():
        rows.append((f"largest difference of {part.replace('_', ' ')}", "", "", f"{difference.largest:.3g}"))
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in ("", *MODES, "difference"))
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _picture(figure: Figure, words: str) -> str:
    content = b64encode(plots.png(figure)).decode()
    return f'<figure><img alt="{escape(words)}" src="data:image/png;base64,{content}"></figure>'
