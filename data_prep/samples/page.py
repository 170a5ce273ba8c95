"""Samples and statistics of them as text for a terminal and as an HTML page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment

from data_prep.samples.statistics import Sample, SampleStatistics, histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BAR = 40
"""Characters of the longest bar."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that would color, move or reverse the text of a terminal; tabs and line breaks are left."""
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
<p>{{ statistics.samples }} samples, {{ summary.tokens }} tokens, {{ summary.supervised_tokens }} supervised,
{{ summary.anchors }} anchors. Origin: {{ origins }}. Finish: {{ finishes }}.</p>
{% for warning in warnings %}
<p class="warning">{{ warning }}</p>
{% else %}
<p>No warnings.</p>
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
<p>{{ sample.facts }}</p>
<pre>{% for text, is_supervised in parts %}
{%- if is_supervised %}<b>{{ text }}</b>{% else %}{{ text }}{% endif %}
{%- endfor %}</pre>
{% endfor %}
</html>
"""
)


class RenderedSample(NamedTuple):
    """A sample and its text in runs of the same mask."""

    sample: Sample
    parts: list[tuple[str, bool]]

    @classmethod
    def of(cls, sample: Sample, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> RenderedSample:
        """An id outside of the vocabulary is shown as a number."""
        parts = []
        pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
        for (mask, is_known), run in groupby(pairs, key=lambda pair: (pair[1], 0 <= pair[0] < vocab_size)):
            ids = [token for token, _ in run]
            parts.append((str(tokenizer.decode(ids)) if is_known else "".join(f"<{k}?>" for k in ids), bool(mask)))
        return cls(sample, parts)


def html_page(statistics: SampleStatistics, samples: Sequence[RenderedSample], title: str) -> str:
    """The whole page."""
    return PAGE.render(
        statistics=statistics,
        summary=statistics.summary(),
        warnings=_warnings(statistics),
        origins=_counts(statistics.origins),
        finishes=_counts(statistics.finishes),
        samples=samples,
        title=title,
    )


def terminal_text(statistics: SampleStatistics, samples: Sequence[RenderedSample], *, color: bool) -> str:
    """The same for a terminal; without ``color`` supervised text stands between ⟦ and ⟧.

    Control characters in what the data say are written as escapes.
    """

    def paint(text: str, code: str) -> str:
        text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        return f"{code}{text}{PLAIN}" if color else text

    lines = []
    for sample, parts in samples:
        lines.append(paint(f"{sample.place}: {sample.facts}", BOLD))
        marked = (
            paint(f"⟦{text}⟧" if supervised and not color else text, GREEN if supervised else DIM)
            for text, supervised in parts
        )
        lines.append("".join(marked) + "\n")
    for name, values in statistics.series().items():
        ranges = histogram(values)
        most = max(number for _, _, number in ranges)
        lines.append(paint(f"{name} of a sample", BOLD))
        lines += [f"{low:>7}–{high:<7} {number:>8} {'█' * -(-BAR * number // most)}" for low, high, number in ranges]
    counts = f"origin: {_counts(statistics.origins)}; finish: {_counts(statistics.finishes)}"
    lines.append(paint(f"{statistics.samples} samples; {counts}", PLAIN))
    lines += [paint(f"warning: {warning}", RED) for warning in _warnings(statistics)]
    return "\n".join(lines)


def _warnings(statistics: SampleStatistics) -> list[str]:
    return [
        f"{statistics.counts[problem]} × {problem} ({'; '.join(places)})"
        for problem, places in statistics.warnings.items()
    ]


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
