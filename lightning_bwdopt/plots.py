"""The pictures, with matplotlib: an optional dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_bwdopt import sizes, timeline
from lightning_bwdopt.memory import MIB, Phase
from lightning_bwdopt.timeline import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = {"forward": "#dbe9f6", "backward": "#fde8d3", "optimizer step": "#dff0d8"}
_MEMORY, _GRADIENTS, _STEP = "#1f4e79", "#b8500a", "#2e7d32"
# The ordinary run lies below, broad and pale, so that equal curves show both.
_ORDINARY: dict[str, Any] = {"color": "#9db8d2", "linewidth": 5, "label": "ordinary"}
_IN_BACKWARD: dict[str, Any] = {"color": "#b8500a", "linewidth": 1.5, "label": "in backward"}


def need_matplotlib(what: str) -> None:
    """Checks that matplotlib is installed.

    Args:
        what: Who wants it, as the user spelled it.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"`{what}` draws with matplotlib, which is not installed. Run `pip install matplotlib`; in a checkout of"
            ' this package, `pip install -c constraints.txt ".[plot]"` takes the version that the tests ran with.'
        )


def draw_estimate(curves: Mapping[str, Sequence[tuple[Phase, int]]], title: str, file: Path) -> None:
    """Draws the bytes alive after each operation of a step, both modes on the same axes.

    Args:
        curves: The phase and the bytes after each operation, for each mode.
        title: What was simulated.
        file: A PNG or SVG.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    unit = sizes.unit_of(max(size for curve in curves.values() for _, size in curve))
    for axes, (mode, curve) in zip(figure.subplots(1, len(curves), sharey=True), curves.items(), strict=True):
        axes.plot([size / unit.bytes for _, size in curve], color=_MEMORY, linewidth=1.2)
        start = 0
        for phase, part in groupby(phase for phase, _ in curve):
            end = start + len(list(part))
            axes.axvspan(start, end, color=_SHADES[phase], linewidth=0)
            start = end
        peak = max(size for _, size in curve)
        axes.set_title(f"{mode}: at most {sizes.in_words(peak)}", fontsize=10)
        axes.set(xlabel="operations of the step", xlim=(0, len(curve)))
        axes.set_ylim(bottom=0)
    figure.axes[0].set_ylabel(f"{unit.name} of tensors on one rank")
    shades = [Patch(color=color, label=phase) for phase, color in _SHADES.items()]
    figure.axes[0].legend(handles=shades, fontsize=8, loc="lower right")
    figure.savefig(file)


def draw_curves(ordinary: Sequence[float], in_backward: Sequence[float], ylabel: str, from_zero: bool) -> Figure:
    """Draws one number of each step, the two runs over each other."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3), layout="constrained")
    axes = figure.subplots()
    for values, style in ((ordinary, _ORDINARY), (in_backward, _IN_BACKWARD)):
        axes.plot(range(1, len(values) + 1), values, marker="o" if len(values) == 1 else "", **style)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=144, metadata={"Software": None})
    return content.getvalue()


class _Limits(NamedTuple):
    """Ends of the axes, for pictures that are laid side by side."""

    ms: float
    memory: tuple[float, float]
    gradients: float

    @classmethod
    def of(cls, timelines: Iterable[Sequence[Sample]]) -> _Limits:
        samples = [sample for timeline in timelines for sample in timeline]
        # From near the data: a process holds hundreds of MiB before its model, next to which a step is a flat line.
        low, high = (end(sample.memory_bytes for sample in samples) / MIB for end in (min, max))
        margin = max(0.05 * (high - low), 0.1)
        return cls(
            max(sample.ms for sample in samples),
            (low - margin, high + margin),
            1.15 * max(1, *(sample.gradient_bytes for sample in samples)) / MIB,
        )


def draw_timelines(timelines: Mapping[str, Sequence[Sample]], memory: str) -> list[Figure]:
    """Draws each timeline by itself, all on the same axes.

    Args:
        timelines: The samples under the title of each.
        memory: What their memory is, in words.
    """
    from matplotlib.figure import Figure

    limits = _Limits.of(timelines.values())
    figures = []
    for title, samples in timelines.items():
        figure = Figure(figsize=(6.4, 6), layout="constrained")
        _draw_timeline(figure, samples, limits, memory, title)
        figures.append(figure)
    return figures


def _draw_timeline(figure: Figure, samples: Sequence[Sample], limits: _Limits, memory: str, title: str) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    times = [sample.ms for sample in samples]
    line: dict[str, Any] = {"linewidth": 1.2, "drawstyle": "steps-post"}
    upper.plot(times, [sample.memory_bytes / MIB for sample in samples], color=_MEMORY, **line)
    lower.plot(times, [sample.gradient_bytes / MIB for sample in samples], color=_GRADIENTS, **line)
    peak, gradients = (sizes.in_words(max(values)) for values in zip(*(sample[-2:] for sample in samples)))
    figure.suptitle(f"{title}: at most {peak}; of gradients {gradients}", fontsize=10)
    upper.set(ylabel=f"MiB, {memory}", ylim=limits.memory, xlim=(0, limits.ms))
    lower.set(ylabel="MiB of gradients", ylim=(0, limits.gradients), xlabel="milliseconds since the step began")
    for axes in (upper, lower):
        for phase in timeline.phases(samples):
            axes.axvspan(phase.start_ms, phase.end_ms, color=_SHADES[phase.name], linewidth=0)
        for step in timeline.steps(samples):
            axes.axvspan(step.start_ms, step.end_ms, ymin=0.94, color=_STEP, linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.yaxis.label.set_size(8)
        axes.xaxis.label.set_size(8)
    upper.legend(handles=_legend(), fontsize=7, loc="lower right", ncols=2, framealpha=0.9)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    parts = [Patch(color=color, label=phase) for phase, color in _SHADES.items()]
    return [*parts, Patch(color=_STEP, label="step of a unit, or of the optimizer")]
