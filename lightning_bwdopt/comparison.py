"""What two runs of one config were like, and what differs between them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lightning_bwdopt.compared_run import timeline_step
from lightning_bwdopt.differences import Difference
from lightning_bwdopt.memory import MIB
from lightning_bwdopt.timeline import Sample, read_csv


@dataclass(frozen=True)
class Run:
    """One of the two runs, as its ranks have written it down.

    Attributes:
        facts: Model, strategy, number of ranks and the like.
        steps: For each rank the losses, seconds and peak of each step.
        timeline: The memory of rank 0 over one step; empty when the run ended before it.
    """

    facts: dict[str, Any]
    steps: list[list[dict[str, Any]]]
    timeline: list[Sample]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads the files of ``compared_run``."""
        facts = json.loads((folder / "facts.json").read_text())
        files = [folder / f"rank{rank}.jsonl" for rank in range(facts["world_size"])]
        recorded = list(folder.glob("memory_*_rank0.csv"))
        return cls(
            facts,
            [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files],
            read_csv(recorded[0]) if recorded else [],
        )

    @property
    def losses(self) -> dict[str, list[float]]:
        """Each loss over the steps; means over ranks and micro-batches."""
        names = self.steps[0][0]["losses"] if self.steps[0] else []
        return {
            name: [fmean(x for rank in step for x in rank["losses"].get(name, [math.nan])) for step in zip(*self.steps)]
            for name in names
        }

    @property
    def seconds(self) -> list[float]:
        """What each step took, on rank 0."""
        return [step["seconds"] for step in self.steps[0]]

    @property
    def peak_mib(self) -> list[float]:
        """The most that each rank held in a step."""
        return [max(step["peak_bytes"] for step in rank) / MIB for rank in self.steps]


@dataclass(frozen=True)
class Comparison:
    """Two runs of one config and what differs between them.

    Attributes:
        ordinary: The run with ``enabled=False``.
        in_backward: The one with the optimizer in backward.
        differences: Of losses, parameters and optimizer state.
        tolerance: The largest difference that is no breach of parity.
        wanted: How many steps were asked for.
    """

    ordinary: Run
    in_backward: Run
    differences: dict[str, Difference]
    tolerance: float
    wanted: int

    @property
    def parity(self) -> bool:
        """Whether the two runs are equal."""
        return all(difference.largest <= self.tolerance for difference in self.differences.values())

    @property
    def saved_mib(self) -> float:
        """What the fullest rank holds less at its peak."""
        return max(self.ordinary.peak_mib) - max(self.in_backward.peak_mib)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """The median step of each run, without the first, which warms up, and the one that was recorded."""
        left_out = {0, timeline_step(self.wanted)}
        medians = []
        for run in (self.ordinary, self.in_backward):
            timed = [seconds for index, seconds in enumerate(run.seconds) if index not in left_out]
            medians.append(median(timed or run.seconds))
        return medians[0], medians[1]

    @property
    def time_ratio(self) -> float:
        """How much longer a step takes in backward."""
        ordinary, in_backward = self.step_seconds
        return in_backward / ordinary

    def verdict(self) -> str:
        """One sentence: are the runs equal?"""
        steps, ranks = len(self.ordinary.seconds), self.ordinary.facts["world_size"]
        run = f"{steps} step{'s' * (steps != 1)} on {ranks} rank{'s' * (ranks > 1)}"
        if not self.parity:
            part, worst = max(self.differences.items(), key=lambda item: item[1].largest)
            how = "do not correspond" if math.isinf(worst.largest) else f"differ by {worst.largest:.3g}"
            return f"Parity is broken: after {run} the {part.replace('_', ' ')} {how} (`{worst.where}`)."
        if any(difference.largest for difference in self.differences.values()):
            return f"Equal within {self.tolerance:g}: losses, parameters and optimizer state of {run}."
        return f"Equal to the bit: losses, parameters and optimizer state of {run}."

    def likely_causes(self) -> list[str]:
        """Sentences on what in the config may have made the runs differ; none when they are equal."""
        if self.parity:
            return []
        facts, causes = self.ordinary.facts, []
        if facts["gradient_clip_val"] and facts["gradient_clipping"] == "disable":
            causes.append(
                f"`gradient_clip_val={facts['gradient_clip_val']}` is disabled in backward. Pass"
                " `gradient_clipping: exact` to the strategy."
            )
        if facts["device"] == "cuda" and not facts["deterministic"]:
            causes.append(
                "Some GPU kernels add up in another order each time. Pass `--trainer.deterministic=true`, or allow for"
                " it with `--tolerance`."
            )
        first = [[rank[0]["losses"] for rank in run.steps if rank] for run in (self.ordinary, self.in_backward)]
        if first[0] != first[1]:
            causes.append(
                "The losses of the first step differ, before any difference between the optimizers: something draws"
                " random numbers that `seed_everything` does not seed, or depends on time or an earlier run."
            )
        return causes

    def as_json(self) -> dict[str, Any]:
        """The figures for machines."""
        runs = {"ordinary": self.ordinary, "in_backward": self.in_backward}
        return {
            "parity": self.parity,
            "verdict": self.verdict(),
            "likely_causes": self.likely_causes(),
            "tolerance": self.tolerance,
            "largest_difference": {part: _finite(d.largest) for part, d in self.differences.items()},
            "largest_difference_at": {part: d.where for part, d in self.differences.items()},
            "steps": len(self.ordinary.seconds),
            **self.ordinary.facts,
            "peak_mib": {name: run.peak_mib for name, run in runs.items()},
            "peak_saved_mib": self.saved_mib,
            "step_seconds": dict(zip(runs, self.step_seconds, strict=True)),
            "time_ratio": self.time_ratio,
            "losses": {
                name: {loss: [_finite(x) for x in values] for loss, values in run.losses.items()}
                for name, run in runs.items()
            },
            "seconds": {name: run.seconds for name, run in runs.items()},
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no other numbers
