"""Lightning's step counters, one for automatic and one for manual optimization, kept equal."""

from __future__ import annotations

from typing import Any


def equalize_counters(checkpoint: dict[str, Any]) -> None:
    """Gives Lightning's step counters for automatic and for manual optimization the same value, in place.

    Each loop counts its own steps, and `global_step` reads one of them: an ordinary checkpoint resumed by the mixin, or
    the other way round, would start at 0.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    automatic = loop.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step")
    manual = loop.get("epoch_loop.manual_optimization.optim_step_progress")
    if not automatic or not manual:
        return
    for counter in ("ready", "completed"):
        steps = max(automatic["total"][counter], manual["total"][counter])
        automatic["total"][counter] = manual["total"][counter] = steps
