"""What a config says of the strategy and of the ranks, before there is a Trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bwdopt.mode import InBackwardStrategy
from lightning_bwdopt.strategies import FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy


def configured_strategy(given: Any, world_size: int) -> InBackwardStrategy:
    """The config's strategy, ready to have its mode set; for ``"auto"`` the one that fits.

    Raises:
        ValueError: it is none of this package's.
    """
    if given == "auto":
        return FSDPOptimInBwdStrategy() if world_size > 1 else SingleDeviceOptimInBwdStrategy()
    strategy = StrategyRegistry.get(given) if given in StrategyRegistry.available_strategies() else given
    if not isinstance(strategy, InBackwardStrategy):
        name = given if isinstance(given, str) else type(given).__name__
        raise ValueError(
            f"`strategy: {name}` cannot step in backward, so there is nothing to compare it with. Pass"
            " `--trainer.strategy=fsdp_optim_in_bwd` or `single_device_optim_in_bwd`, or leave `strategy` out."
        )
    return strategy


def configured_ranks(trainer: Any) -> int:
    """The ranks of a config's ``trainer`` section.

    Raises:
        ValueError: as many as there are devices, which may not be those of this machine.
    """
    devices, nodes = trainer["devices"], trainer["num_nodes"]
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        devices = [part for part in devices.split(",") if part] if "," in devices else int(devices)
    if isinstance(devices, list):
        return len(devices) * nodes
    if isinstance(devices, int) and devices > 0:
        return devices * nodes
    if not on_gpu(trainer["accelerator"]):
        return nodes
    raise ValueError(
        f"`devices: {devices}` is as many as the machine that trains has, which is not known here. Pass a number:"
        " `--trainer.devices=8`."
    )


def on_gpu(accelerator: Any) -> bool:
    """Whether a config's ``accelerator`` is a GPU."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


class UnknownArgumentError(ValueError):
    """An argument that the parser of ``fit`` does not know; the message names the nearest one.

    Args:
        argument: As the user spelled it.
        known: Those that there are.
    """

    def __init__(self, argument: str, known: Iterable[str]) -> None:
        self.argument = argument
        self.known = tuple(known)
        nearest = get_close_matches(argument, self.known, n=1)
        instead = f"Did you mean `{nearest[0]}`?" if nearest else "`lightning-bwdopt fit --help` names those of `fit`."
        super().__init__(f"`{argument}` is no argument of this command. {instead}")


def argument_error(message: str, known: Iterable[str]) -> ValueError:
    """What the parser of ``fit`` found wrong.

    Args:
        message: The parser's own.
        known: The arguments that there are, such as ``--config``.
    """
    unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
    return UnknownArgumentError(unknown[1], known) if unknown else ValueError(message)
