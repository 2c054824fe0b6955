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
