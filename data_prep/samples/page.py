"""Samples and figures about them, for a terminal and as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment

from data_prep.samples.statistics import Findings, Sample, histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BAR = 40
"""Characters of the longest bar."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What would color, move or reverse the text of a terminal; tabs and line breaks are left."""


class Shown(NamedTuple):
    """A sample and its text in runs of the same mask."""

    sample: Sample
    parts: list[tuple[str, bool]]


PLAIN, DIM, GREEN, RED, BOLD = (f"\x1b[{code}m" for code in (0, 2, 32, 31, 1))

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .8em; border-radius: 4px; color: #777 }
pre b { font-weight: normal; background: #c9efcf; color: #063 }
td { padding: 0 .8em 0 0; vertical-align: middle; text-align: right; font-variant-numeric: tabular-nums }
td div { background: #4a90c2; height: .8em } .warning { color: #a40000 }
</style>
<h1>{{ title }}</h1>
<p>{{ findings.samples }} samples, {{ summary.tokens }} tokens, {{ summary.supervised_tokens }} supervised,
{{ summary.anchors }} anchors. Origin: {{ origins }}. Finish: {{ finishes }}.</p>
{% for problem, places in findings.warnings.items() %}
<p class="warning">{{ findings.counts[problem] }} × {{ problem }}: {{ places|join("; ") }}</p>
{% else %}
<p>Nothing odd.</p>
{% endfor %}
{% for name, ranges in summary.histograms.items() %}
<h2>{{ name|capitalize }} of a sample</h2>
<table>{% set most = ranges|map(attribute=2)|max %}
{% for low, high, number in ranges %}
<tr><td>{{ low }}–{{ high }}</td><td>{{ number }}</td>
<td style="width: 30em"><div style="width: {{ 100 * number / most }}%"></div></td></tr>
{% endfor %}
</table>
{% endfor %}
<h2>Samples</h2>
<p>What the target wrote, and a draft is to predict, is <b style="background: #c9efcf">green</b>.</p>
{% for sample, parts in samples %}
<h3>{{ sample.place }}</h3>
<p>{{ sample.input_ids|length }} tokens, {{ sample.supervised }} supervised, {{ sample.anchors }} anchors,
finish {{ sample.finish }}, origin {{ sample.origin }}</p>
<pre>{% for text, taught in parts %}{% if taught %}<b>{{ text }}</b>{% else %}{{ text }}{% endif %}{% endfor %}</pre>
{% endfor %}
</html>
"""
)


def html_page(findings: Findings, shown: Sequence[Shown], title: str) -> str:
    """The whole page."""
    return PAGE.render(
        findings=findings,
        summary=findings.summary(),
        origins=_listed(findings.origins),
        finishes=_listed(findings.finishes),
        samples=shown,
        title=title,
    )


def terminal_text(findings: Findings, shown: Sequence[Shown], *, color: bool) -> str:
    """The same for a terminal; without ``color`` supervised text stands between ⟦ and ⟧.

    Control characters in what the data say are written as escapes.
    """
    parts = []
    for sample, runs in shown:
        facts = f"{len(sample.input_ids)} tokens, {sample.supervised} supervised, {sample.anchors} anchors"
        parts.append(_paint(f"{sample.place}: {facts}, finish {sample.finish}, origin {sample.origin}", BOLD, color))
        marked = (
            _paint(f"⟦{text}⟧" if taught and not color else text, GREEN if taught else DIM, color)
            for text, taught in runs
        )
        parts.append("".join(marked) + "\n")
    for name, values in findings.series().items():
        ranges = histogram(values)
        most = max(number for _, _, number in ranges)
        parts.append(_paint(f"{name} of a sample", BOLD, color))
        parts += [f"{low:>7}–{high:<7} {number:>8} {'█' * -(-BAR * number // most)}" for low, high, number in ranges]
    origins, finishes = (escaped(_listed(counts)) for counts in (findings.origins, findings.finishes))
    parts.append(f"{findings.samples} samples; origin: {origins}; finish: {finishes}")
    for problem, places in findings.warnings.items():
        text = f"warning: {findings.counts[problem]} × {problem} ({'; '.join(places)})"
        parts.append(_paint(text, RED, color))
    return "\n".join(parts)


def spans(sample: Sample, tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[tuple[str, bool]]:
    """The sample's text in runs of the same mask; an id outside of the ``rows`` of the vocabulary as a number."""
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    for (taught, is_known), run in groupby(pairs, key=lambda pair: (pair[1], 0 <= pair[0] < rows)):
        ids = [token for token, _ in run]
        text = tokenizer.decode(ids) if is_known else "".join(f"<{token}?>" for token in ids)
        assert isinstance(text, str)
        yield text, bool(taught)


def escaped(text: str) -> str:
    """``text`` with its control characters as escapes."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _paint(text: str, code: str, color: bool) -> str:
    text = escaped(text)
    return f"{code}{text}{PLAIN}" if color else text


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
