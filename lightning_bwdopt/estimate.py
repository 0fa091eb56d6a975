"""``lightning-bwdopt estimate``: will it fit, and what would stepping in backward save."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bwdopt import plots, sizes
from lightning_bwdopt.configured import UnknownArgumentError
from lightning_bwdopt.measured_step import StepMemory
from lightning_bwdopt.memory import CATEGORIES, MIB, PHASES
from lightning_bwdopt.simulation import simulate
from lightning_bwdopt.sizes import in_words

# Below this share of the ordinary peak a saving is not worth a change.
_WORTHWHILE = 0.02


@dataclass(frozen=True)
class Estimate:
    """The simulated memory of one rank, with the optimizer after and in backward."""

    ordinary: StepMemory
    in_backward: StepMemory

    @property
    def saved(self) -> int:
        """Bytes that stepping in backward takes off the peak."""
        return self.ordinary.peak.bytes - self.in_backward.peak.bytes

    def as_json(self) -> dict[str, Any]:
        """The figures for machines; every size in MiB."""
        return {
            "ordinary": _mode_as_json(self.ordinary),
            "in_backward": _mode_as_json(self.in_backward),
            "saved_mib": self.saved / MIB,
            "layer_gradient_mib": self.ordinary.layer_gradient / MIB,
            "world_size": self.ordinary.world_size,
            "strategy": self.ordinary.strategy,
            "units": self.ordinary.units,
            "advice": self.advice(),
        }

    def advice(self) -> str:
        """One sentence: what stepping in backward would do here, and what else would help."""
        ordinary = self.ordinary.peak
        if self.saved >= _WORTHWHILE * ordinary.bytes:
            share = f"{self.saved / ordinary.bytes:.0%} of the peak"
            return f"The optimizer in backward saves {in_words(self.saved)} ({share})."
        little = f"The optimizer in backward saves {in_words(max(0, self.saved))}:"
        if self.ordinary.trainable < 0.5:
            return (
                f"{little} gradients of frozen parameters are none: little to gain"
                f" ({self.ordinary.trainable:.1%} of the parameters are trained)."
            )
        if max(ordinary.categories, key=ordinary.categories.__getitem__) == "activations":
            return (
                f"{little} it will not help here: activations dominate the peak; use activation checkpointing"
                " (`activation_checkpointing_policy`), or smaller batches."
            )
        left = self.in_backward.peak
        most = max(left.categories, key=left.categories.__getitem__)
        return (
            f"{little} it will not help here: the peak is in the {self.in_backward.phase} and most of"
            f" it is {_words(most)} ({in_words(left.categories[most])})."
        )

    def title(self) -> str:
        """What was simulated."""
        ranks = self.ordinary.world_size
        model = f"{self.ordinary.model}, {self.ordinary.strategy}"
        return f"{model}, one of {ranks} rank{'s' * (ranks > 1)}, a steady step"

    def table(self) -> str:
        """The figures for readers."""
        modes = (self.ordinary, self.in_backward)
        # One unit for all, small enough to show a layer beside the peak; at least three digits of the peak.
        most = max(mode.most for mode in modes)
        unit = sizes.unit_of(min(most, MIB))  # KiB, or MiB
        decimals = 1 if most >= 10 * unit.bytes else 2
        lines = [
            f"{self.title()}; {unit.name}",
            f"{self.ordinary.units}.",
            "",
            f"{'':<26}{'ordinary':>12}{'in backward':>14}",
        ]

        def row(name: str, columns: list[int]) -> None:
            lines.append(
                f"{name:<26}{columns[0] / unit.bytes:>12.{decimals}f}{columns[1] / unit.bytes:>14.{decimals}f}"
            )

        for category in CATEGORIES:
            row(_words(category), [mode.peak.categories[category] for mode in modes])
        row("peak", [mode.peak.bytes for mode in modes])
        lines.append("")
        for phase in PHASES:
            row(f"most in {phase}", [mode.peaks[phase].bytes if phase in mode.peaks else 0 for mode in modes])
        lines.append("")
        for name, mode in (("ordinary", self.ordinary), ("in backward", self.in_backward)):
            after = f", after `{mode.peak.after}`" if mode.peak.after else ""
            lines.append(f"The {name} peak is in the {mode.phase}{after}.")
            if mode.most > mode.peak.bytes:
                highest = max(mode.peaks, key=lambda phase: mode.peaks[phase].bytes)
                lines[-1] += f" The {highest} is level with it (within 1%): {in_words(mode.most)}."
        layers = self.ordinary.peak.categories["gradients"] / max(1, self.ordinary.layer_gradient)
        lines.append(
            f"The gradients of one layer take {in_words(self.ordinary.layer_gradient)}; the ordinary peak holds"
            f" {layers:.1f} times that."
        )
        lines.append(self.advice())
        lines.append(
            "On top come what kernels take for themselves, the allocator's fragments and the device's context."
        )
        return "\n".join(lines)


def estimate(args: list[str], *, world_size: int | None = None, real_weights: bool = False) -> Estimate:
    """Simulates a config's steady step in both modes.

    Args:
        args: Command-line arguments of ``fit``, such as ``["--config", "train.yaml"]``.
        world_size: Ranks; ``None``: those of the config.
        real_weights: Build the model with real weights, for one that cannot be built without.

    Raises:
        ValueError: the config has a strategy or an option that cannot be simulated.
        RuntimeError: the module does something that needs the values of tensors.
    """
    ordinary, in_backward = (
        simulate(args, enabled=enabled, world_size=world_size, real_weights=real_weights) for enabled in (False, True)
    )
    return Estimate(ordinary, in_backward)


def main(args: list[str]) -> int:
    """Runs ``lightning-bwdopt estimate``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-bwdopt estimate",
        description="Simulates a training step of a config, without its memory and without weights, with the optimizer"
        " after and in backward, and prints the peak memory of one rank.",
        epilog="Every other argument is one of `lightning-bwdopt fit`: --config FILE, --data.batch_size=4,"
        " --trainer.precision=bf16-true, … The config's callbacks and loggers are left out.",
        allow_abbrev=False,
    )
    parser.add_argument("--world_size", type=int, metavar="RANKS", help="ranks to pretend (default: as in the config)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, in MiB")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the memory over the step (needs matplotlib)"
    )
    parser.add_argument(
        "--fits", type=_parsed_size, metavar="SIZE", help="such as 24GiB: exit with 1 if it does not fit"
    )
    parser.add_argument(
        "--real_weights",
        action="store_true",
        help="build the model with its weights first (takes that memory here), for one that cannot be built without",
    )
    options, rest = parser.parse_known_args(args)
    try:
        if options.plot:
            plots.need_matplotlib("--plot")
        result = estimate(rest, world_size=options.world_size, real_weights=options.real_weights)
    except UnknownArgumentError as error:
        parser.error(str(UnknownArgumentError(error.argument, (*error.known, *parser._option_string_actions))))
    except (ModuleNotFoundError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(result.table())
    if options.json:
        options.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    if options.plot:
        curves = {"ordinary": result.ordinary.curve, "in backward": result.in_backward.curve}
        plots.draw_estimate(curves, result.title(), options.plot)
    if options.fits is None:
        return 0
    needed = [result.ordinary.most, result.in_backward.most]
    for name, size in zip(("ordinary", "in backward"), needed):
        fits = "fits" if size <= options.fits else "does not fit"
        print(f"{name}: {in_words(size)} {fits} into {in_words(options.fits)}.")
    return int(needed[1] > options.fits)


def _parsed_size(text: str) -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mode_as_json(mode: StepMemory) -> dict[str, Any]:
    peak = mode.peak
    return {
        "peak_mib": peak.bytes / MIB,
        "most_mib": mode.most / MIB,
        "categories": {category: size / MIB for category, size in peak.categories.items()},
        "phase": mode.phase,
        "after": peak.after,
        "phases": {phase: peak.bytes / MIB for phase, peak in mode.peaks.items()},
    }


def _words(category: str) -> str:
    return {"communication": "communication buffers"}.get(category, category.replace("_", " "))
