"""Lightning's step counters, one for automatic and one for manual optimization, kept equal."""

from __future__ import annotations

from typing import Any


def equalize(one: dict[str, int], other: dict[str, int]) -> None:
    """Gives both counts of steps, as Lightning's progress trackers hold them, the larger value, in place."""
    for counter in ("ready", "completed"):
        one[counter] = other[counter] = max(one[counter], other[counter])


def equalize_saved(checkpoint: dict[str, Any]) -> None:
    """Equalizes the counters of a checkpoint, in place.

    Each loop counts its own steps, and `global_step` reads one of them: an ordinary checkpoint resumed by the mixin, or
    the other way round, would start at 0.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    automatic = loop.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step")
    manual = loop.get("epoch_loop.manual_optimization.optim_step_progress")
    if automatic and manual:
        equalize(automatic["total"], manual["total"])
