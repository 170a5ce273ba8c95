"""Samples and statistics of them as text for a terminal and as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment

from data_prep.samples.statistics import Sample, SampleStatistics, histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BAR = 40  # characters of the longest bar
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that would color, move or reverse the text of a terminal; tabs and line breaks are left."""
PLAIN, DIM, GREEN, RED, BOLD = (f"\x1b[{code}m" for code in (0, 2, 32, 31, 1))

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .8em; border-radius: 4px; color: #777 }
b { font-weight: normal; background: #c9efcf; color: #063 } .warning { color: #a40000 }
</style>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for warning in warnings %}
<p class="warning">{{ warning }}</p>
{% else %}
<p>No warnings.</p>
{% endfor %}
{% for name, lines in histograms.items() %}
<h2>{{ name|capitalize }} of a sample</h2>
<pre>{{ lines|join("\n") }}</pre>
{% endfor %}
<h2>Samples</h2>
<p>What the target wrote, and a draft is to predict, is <b>green</b>.</p>
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
        title=title,
        summary=_summary(statistics),
        warnings=_warnings(statistics),
        histograms=_histograms(statistics),
        samples=samples,
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
        marked = (
            paint(f"⟦{text}⟧" if is_supervised and not color else text, GREEN if is_supervised else DIM)
            for text, is_supervised in parts
        )
        lines += [paint(f"{sample.place}: {sample.facts}", BOLD), "".join(marked) + "\n"]
    for name, bars in _histograms(statistics).items():
        lines += [paint(f"{name} of a sample", BOLD), *bars]
    lines.append(paint(_summary(statistics), PLAIN))
    lines += [paint(f"warning: {warning}", RED) for warning in _warnings(statistics)]
    return "\n".join(lines)


def _summary(statistics: SampleStatistics) -> str:
    totals = (f"{sum(values)} {name}" for name, values in statistics.series().items())
    counts = {"origin": statistics.origins, "finish": statistics.finishes}
    parts = (f"{name}: " + ", ".join(f"{k} {each}" for each, k in value.items()) for name, value in counts.items())
    return f"{statistics.samples} samples, {', '.join(totals)}; {'; '.join(parts)}"


def _warnings(statistics: SampleStatistics) -> list[str]:
    return [
        f"{statistics.counts[problem]} × {problem} ({'; '.join(places)})"
        for problem, places in statistics.warnings.items()
    ]


def _histograms(statistics: SampleStatistics) -> dict[str, list[str]]:
    """A bar for each range of values, by name of the values."""
    result = {}
    for name, values in statistics.series().items():
        ranges = histogram(values)
        most = max(number for _, _, number in ranges)
        result[name] = [f"{a:>7}–{b:<7} {number:>8} {'█' * -(-BAR * number // most)}" for a, b, number in ranges]
    return result
