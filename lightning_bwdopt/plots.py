"""The pictures, with matplotlib: an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_bwdopt.memory import MIB, Phase


def need_matplotlib(what: str) -> None:
    """Checks that matplotlib is installed.

    Args:
        what: Who wants it, as the user spelled it.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"`{what}` draws with matplotlib, which is not installed. Install it, or this package's extra `plot`:"
            " `pip install 'lightning_bwdopt[plot]'`."
        )


def draw_estimate(ordinary: Sequence[tuple[Phase, int]], in_backward: Sequence[tuple[Phase, int]], file: Path) -> None:
    """Draws the bytes alive after each operation of a step, both modes on the same axes, into a PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in (("ordinary", ordinary), ("in backward", in_backward)):
        axes.plot([index / len(curve) for index in range(len(curve))], [size / MIB for _, size in curve], label=name)
    axes.set(xlabel="part of the step's operations", ylabel="MiB of tensors on one rank", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file)
