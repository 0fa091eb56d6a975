"""The single-device strategy."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_bwdopt import arguments, checks, sharding
from lightning_bwdopt.arguments import GradientClipping, Granularity, NonFinite
from lightning_bwdopt.checkpoints import Checkpoints
from lightning_bwdopt.mode import InBackwardStrategy, log_units
from lightning_bwdopt.units import named_units

if TYPE_CHECKING:
    from lightning.fabric.strategies import _StrategyRegistry
    from lightning.pytorch import Trainer


class SingleDeviceOptimInBwdStrategy(InBackwardStrategy, Checkpoints, SingleDeviceStrategy):
    """Trains on one device with the optimizer inside the backward pass.

    ``Trainer(strategy="single_device_optim_in_bwd")``. Results are those of Lightning's own single-device strategy.

    Args:
        device: The device, such as ``"cuda:1"``; ``None``: the one that the accelerator chose.
        enabled: The mode. ``False`` is the ordinary run.
        granularity: ``"unit"``: one step per repeated block of the model, small neighbours together;
            ``"parameter"``: one per parameter.
        gradient_clipping: What to do about ``Trainer(gradient_clip_val=…)``: ``"disable"`` it with a warning,
            ``"error"``, or clip ``"exact"``ly, for which clipping by norm runs backward twice.
        on_nonfinite: On a loss that is NaN or infinite: ``"ignore"``, ``"error"``, or ``"skip"`` the step.
        self_check: Probe an optimizer class that is not known, and refuse it where its result would change.
        **unsupported: Nothing; an unknown name is answered with the nearest known one.

    Raises:
        TypeError: an unknown argument.
        ValueError: an option out of its choices.

    Example::

        trainer = Trainer(strategy="single_device_optim_in_bwd", devices=1)
    """

    strategy_name = "single_device_optim_in_bwd"

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        *,
        enabled: bool = True,
        granularity: Granularity = "unit",
        gradient_clipping: GradientClipping = "disable",
        on_nonfinite: NonFinite = "ignore",
        self_check: bool = True,
        **unsupported: Any,
    ) -> None:
        arguments.check_names(unsupported, list(inspect.signature(type(self)).parameters)[:-1])
        super().__init__(device="cpu" if device is None else device)
        self._device_given = device is not None
        self._init_mode(enabled, granularity, gradient_clipping, on_nonfinite, self_check)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Empty until the Trainer's accelerator connector assigns the devices that it chose."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if not devices:
            return
        checks.check_one_device(devices)
        if not self._device_given:
            self._root_device = devices[0]

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        checks.check_wrapped(self.lightning_module)
        if self.enabled:
            checks.check_grad_scaler(self.precision_plugin)
        self._blocks = sharding.find_blocks(self.lightning_module)
        super().setup(trainer)
        if self.enabled and trainer.state.fn == TrainerFn.FITTING:
            log_units(named_units(self.lightning_module, self._blocks))

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="One device with the optimizer in backward")
