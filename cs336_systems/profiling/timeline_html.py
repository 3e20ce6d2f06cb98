"""A timeline as one HTML file: a picture, its legend and a table, without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .categories import RULES, Kind, Rule, category_of
from .memory import MIB
from .report import format_number
from .timeline import COLOURS, OTHER_COLOUR, Timeline

_WIDTH, _HEIGHT = 1000, 400
_TICKS = 4
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #9aa0a6; --soft: #e6e6e6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --line: #6b7178; --soft: #2c3034 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.2rem; margin: 0 0 .5rem } h2 { font-size: 1.05rem; margin: 1.5rem 0 .5rem }
.picture { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .5rem }
.scale { position: relative; min-width: 3.6rem; font-size: .8rem }
.scale span { position: absolute; right: 0; transform: translateY(-50%); white-space: nowrap }
.chart { position: relative; height: clamp(220px, 50vh, 420px); border: 1px solid var(--line); background: #ffffff }
.chart svg { display: block; width: 100%; height: 100% }
.phases { grid-column: 2; position: relative; height: 1.6rem; font-size: .8rem }
.phases span { position: absolute; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: center;
  border-left: 1px solid var(--line); padding: .1rem .2rem }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; margin: .8rem 0; list-style: none;
  font-size: .85rem }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .35rem; vertical-align: -.1rem;
  border: 1px solid var(--line) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--soft); vertical-align: top }
td.number, th.number { text-align: right; white-space: nowrap }
"""


def timeline_page(
    timeline: Timeline,
    largest: Sequence[Kind],
    *,
    title: str,
    notes: Sequence[str] = (),
    rules: Sequence[Rule] = RULES,
) -> str:
    """The page, which reads on light and dark screens and at the width of a phone.

    Args:
        timeline: what is drawn; resting on a layer names it.
        largest: the kinds of allocations that the table lists, in this order.
        title: of the page.
        notes: sentences below the picture: how it was recorded.
        rules: by which the table's categories are found.
    """
    event, peak = timeline.peak
    summary = f"Peak {_mib(peak)} at event {event} of {timeline.length}, in the {_phase_at(timeline, event)} phase."
    texts = "".join(f"<p>{escape(text)}</p>" for text in (summary, *notes))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<div class="picture"><div class="scale">{_scale(peak)}</div>
<div class="chart">{_drawing(timeline)}</div><div class="phases">{_phases(timeline)}</div></div>
<ul class="legend">{_legend(timeline)}</ul>
{texts}
<h2>The largest allocations</h2>
<div class="wide">{_table(largest, rules)}</div>
</body></html>
"""


def _top(peak: int) -> float:
    return 1.05 * max(1, peak)


def _drawing(timeline: Timeline) -> str:
    """The layers as steps, each stretched to the width of the page, and a line where a phase begins."""
    length, top = max(1, timeline.length), _top(timeline.peak[1])
    below = [0] * len(timeline.events)
    xs = [_WIDTH * event / length for event in (*timeline.events, length)]
    shapes = []
    for name, layer in timeline.layers.items():
        above = [low + size for low, size in zip(below, layer, strict=True)]
        if any(layer):
            outline = _steps(xs, above, top, "M") + _steps(xs[::-1], below[::-1], top, "L") + "Z"
            colour = COLOURS.get(name, OTHER_COLOUR)
            label = f"{name}: at most {_mib(max(layer))}"
            shapes.append(f'<path d="{outline}" fill="{colour}"><title>{escape(label)}</title></path>')
        below = above
    for phase in timeline.phases[1:]:
        x = _WIDTH * phase.begin / length
        dashed = 'stroke="#1a1a1a" stroke-dasharray="6 4" vector-effect="non-scaling-stroke"'
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" {dashed}/>')
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="Allocated memory over time">{"".join(shapes)}</svg>'


def _steps(xs: Sequence[float], levels: Sequence[int], top: float, begin: str) -> str:
    """A path along the levels, each from one x to the next; where the level stays, nothing is written."""
    heights = [f"{_HEIGHT * (1 - level / top):.1f}" for level in levels]
    parts = [f"{begin}{xs[0]:.0f} {heights[0]}"]
    for index in range(1, len(heights)):
        if heights[index] != heights[index - 1]:
            parts.append(f"H{xs[index]:.0f}V{heights[index]}")
    return "".join([*parts, f"H{xs[-1]:.0f}"])


def _scale(peak: int) -> str:
    top = _top(peak)
    parts = [(part / _TICKS, top * (1 - part / _TICKS)) for part in range(_TICKS + 1)]
    return "".join(f'<span style="top:{100 * place:.0f}%">{_mib(level)}</span>' for place, level in parts)


def _phases(timeline: Timeline) -> str:
    length = max(1, timeline.length)
    return "".join(
        f'<span style="left:{100 * phase.begin / length:.2f}%;width:{100 * (phase.end - phase.begin) / length:.2f}%"'
        f' title="{escape(phase.name)}">{escape(phase.name)}</span>'
        for phase in timeline.phases
    )


def _legend(timeline: Timeline) -> str:
    shown = [name for name, layer in timeline.layers.items() if any(layer)]
    return "".join(
        f'<li><i style="background:{COLOURS.get(name, OTHER_COLOUR)}"></i>{escape(name)}</li>' for name in shown[::-1]
    )


def _table(largest: Sequence[Kind], rules: Sequence[Rule]) -> str:
    lines = []
    for kind in largest:
        allocation, origin = kind.first, kind.first.origin
        told = (str(kind.times), kind.module, *(("", "") if origin is None else (origin.operation, origin.place)))
        cells = (category_of(allocation, rules), allocation.phase, *told)
        lines.append(
            f'<tr><td class="number">{_mib(allocation.bytes)}</td>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    heads = "".join(f"<th>{name}</th>" for name in ("category", "phase", "times", "module", "operation", "statement"))
    return f'<table><tr><th class="number">size</th>{heads}</tr>{"".join(lines)}</table>'


def _phase_at(timeline: Timeline, event: int) -> str:
    return next((phase.name for phase in timeline.phases if phase.begin <= event < phase.end), "first")


def _mib(size: float) -> str:
    return f"{format_number(size / MIB)} MiB"
