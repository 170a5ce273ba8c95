"""Samples and their statistics as lines of styled text, for a terminal and for an HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from data_prep.samples.statistics import Sample, SampleStatistics, histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""
ANSI = {"plain": 0, "dim": 2, "supervised": 32, "warning": 31, "heading": 1}
"""Styles, and their codes in a terminal."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that would color, move or reverse the text of a terminal; tabs and line breaks are left."""
BAR = 40  # characters of the longest bar
PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
pre {{ white-space: pre-wrap; font-size: 14px; line-height: 1.5 }} .heading {{ font-weight: bold }}
.dim {{ color: #777 }} .supervised {{ background: #c9efcf; color: #063 }} .warning {{ color: #a40000 }}
</style>
<h1>{title}</h1>
<p>What the target wrote, and a draft is to predict, is <span class="supervised">green</span>.</p>
<pre>{body}</pre>
</html>
"""


def sample_lines(sample: Sample, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[Line]:
    """A sample's text in runs of the same mask; ids outside of the vocabulary are shown as numbers."""
    text = []
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    for (mask, is_known), run in groupby(pairs, key=lambda pair: (pair[1], 0 <= pair[0] < vocab_size)):
        ids = [token for token, _ in run]
        part = str(tokenizer.decode(ids)) if is_known else "".join(f"<{token}?>" for token in ids)
        text.append((part, "supervised" if mask else "dim"))
    figures = "{} tokens, {} supervised, {} anchors".format(*sample.figures)
    heading = f"{sample.place}: {figures}, finish {sample.finish}, origin {sample.origin}"
    return [[(heading, "heading")], text, []]


def statistics_lines(statistics: SampleStatistics) -> Iterator[Line]:
    """Histograms, totals and warnings."""
    for name, values in statistics.series.items():
        yield [(f"{name} of a sample", "heading")]
        ranges = histogram(values)
        most = max(number for _, _, number in ranges)
        for low, high, number in ranges:
            yield [(f"{low:>7}–{high:<7} {number:>8} {'█' * -(-BAR * number // most)}", "plain")]
    totals = {"samples": statistics.samples, **{name: sum(values) for name, values in statistics.series.items()}}
    counts = {"": totals, "origin: ": statistics.origins, "finish: ": statistics.finishes}
    parts = (name + ", ".join(f"{n} {kind}" for kind, n in each.items()) for name, each in counts.items())
    yield [("; ".join(parts), "plain")]
    for problem, places in statistics.warnings.items():
        yield [(f"warning: {statistics.counts[problem]} × {problem} ({'; '.join(places)})", "warning")]


def terminal_text(lines: Sequence[Line], *, color: bool) -> str:
    """The lines with control characters as escapes; without ``color`` supervised text stands between ⟦ and ⟧."""

    def paint(text: str, style: str) -> str:
        text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        if color:
            return f"\x1b[{ANSI[style]}m{text}\x1b[0m"
        return f"⟦{text}⟧" if style == "supervised" else text

    return "\n".join("".join(paint(*piece) for piece in line) for line in lines)


def html_page(lines: Sequence[Line], title: str) -> str:
    """The lines as a whole page."""
    spans = ([f'<span class="{style}">{html.escape(text)}</span>' for text, style in line] for line in lines)
    return PAGE.format(title=html.escape(title), body="\n".join(map("".join, spans)))
