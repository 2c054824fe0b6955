"""Plots of the benchmarks' figures, as PNG files."""

from __future__ import annotations

from pathlib import Path


def plot_bars(path: Path, series: dict[str, dict[str, float]], title: str) -> None:
    """One small bar chart a figure, side by side; ``series`` is figures by what they were measured on."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for figures in series.values() for name in figures))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    chart, axes = pyplot.subplots(rows, columns, figsize=(3.4 * columns, 2.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        values = {engine: figures[name] for engine, figures in series.items() if name in figures}
        bars = axis.bar(list(values), list(values.values()), color=[f"C{index}" for index in range(len(values))])
        axis.bar_label(bars, fmt="%.3g")
        axis.set_title(name, fontsize=9)
        axis.margins(y=0.15)
    chart.suptitle(title)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def plot_shares(path: Path, shares: dict[str, dict[str, float]], title: str) -> None:
    """A bar for every case, grouped by op: ``shares`` of a ceiling, 1 being all of it, by op and case."""
    from matplotlib import pyplot

    bars = [(op, f"{op}: {case}", share) for op, cases in shares.items() for case, share in cases.items()]
    chart, axis = pyplot.subplots(figsize=(11, 1 + 0.22 * len(bars)), layout="constrained")
    colors = {op: f"C{index}" for index, op in enumerate(shares)}
    drawn = axis.barh([label for _, label, _ in bars], [share for *_, share in bars], color=[colors[op] for op, *_ in bars])
    axis.bar_label(drawn, fmt="{:.0%}", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.1)
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(y=0.01)
    axis.set_title(title)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)
