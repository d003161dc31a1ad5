"""Pictures of measured values. Nothing here needs a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.samples import Sample


def plot_load(samples: Sequence[Sample], path: Path) -> None:
    """Distributions of TTFT and ITL, and every token of every stream over time."""
    answered = [s for s in samples if s.ok]
    figure, (ttft, itl, timeline) = _figure(3, "load")
    cumulate(ttft, {"TTFT": [s.ttft_s for s in answered if s.ttft_s is not None]}, "TTFT (s)")
    cumulate(itl, {"ITL": [gap for s in answered for gap in s.itls_s]}, "ITL (s)")
    start_s = min(s.due_s for s in samples)
    for index, sample in enumerate(samples):
        timeline.plot(
            [time_s - start_s for time_s in sample.token_times_s],
            [index] * len(sample.token_times_s),
            "|",
            color="tab:blue" if sample.ok else "tab:red",
            markersize=4,
        )
    timeline.set_xlabel("time (s)")
    timeline.set_ylabel("request")
    save(figure, path)


def plot_distributions(title: str, series: Mapping[str, Sequence[float]], unit: str, path: Path) -> None:
    """One panel: the cumulative distribution of each series."""
    figure, (axes,) = _figure(1, title)
    cumulate(axes, series, unit)
    save(figure, path)


def plot_bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str, path: Path) -> None:
    """One panel: for each group, a bar for each of its labels. All groups have the same labels."""
    figure, (axes,) = _figure(1, title)
    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    width = 0.8 / max(1, len(labels))
    for offset, label in enumerate(labels):
        heights = [bars.get(label, 0.0) for bars in groups.values()]
        axes.bar(np.arange(len(groups)) + offset * width, heights, width, label=label)
    axes.set_xticks(np.arange(len(groups)) + width * (len(labels) - 1) / 2, list(groups))
    axes.set_ylabel(unit)
    axes.legend()
    save(figure, path)


def cumulate(axes: Axes, series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Draw cumulative distributions; empty series are left out."""
    for label, values in series.items():
        if values:
            axes.step(np.sort(np.asarray(values)), np.arange(1, len(values) + 1) / len(values), label=label)
    axes.set_xlabel(unit)
    axes.set_ylabel("share at or below")
    if any(series.values()):
        axes.legend(loc="lower right", fontsize="small")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, making its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _figure(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7 * panels, 4.5), layout="constrained")
    figure.suptitle(fill(title, 80 * panels), fontsize="medium")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])
