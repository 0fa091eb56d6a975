"""Callbacks that look at a run with the optimizer in backward, or at an ordinary one beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt.clipping import total_norm
from lightning_bwdopt.mode import InBackwardStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_bwdopt.optimizer import OptimizerInBackward


class OptimInBwdMonitor(LearningRateMonitor):
    """Logs, once per optimizer step, the learning rate that each parameter group really used.

    ``LearningRateMonitor`` logs what the scheduler announces before the batch. This callback logs, under the same names
    and steps, what the hooks read when they stepped; in an ordinary run what ``optimizer.step()`` reads.

    Args:
        log_momentum: Also log each group's momentum (``betas[0]`` where there are betas).
        log_weight_decay: Also log each group's weight decay.
        log_grad_norm: Also log ``grad_norm``, the global L2 norm of the gradients before clipping, over all ranks.
        log_stepped_parameters: Also log ``stepped_parameters``, how many parameter tensors the step moved.

    Raises:
        MisconfigurationException: when the Trainer has no logger.
    """

    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_grad_norm: bool = False,
        log_stepped_parameters: bool = True,
    ) -> None:
        super().__init__(logging_interval="step", log_momentum=log_momentum, log_weight_decay=log_weight_decay)
        self.log_grad_norm = log_grad_norm
        self.log_stepped_parameters = log_stepped_parameters
        self._used: dict[int, list[dict[str, Any]]] = {}  # id(optimizer) -> the groups as this step read them
        self._norms: list[Tensor] = []
        self._stepped = 0

    @override
    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_start(trainer, *args, **kwargs)
        for core in _cores(trainer).values():
            core.treatment.sums_norm |= self.log_grad_norm

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._used.clear()
        self._norms.clear()
        self._stepped = 0

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        core = _cores(trainer).get(id(optimizer))
        if core is None:
            self._used[id(optimizer)] = [_snapshot(group) for group in optimizer.param_groups]
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._stepped += len(gradients)
            if self.log_grad_norm:
                self._norms.append(total_norm(gradients))
            return
        self._used[id(optimizer)] = [
            used or _snapshot(group) for used, group in zip(core.used_groups, optimizer.param_groups, strict=True)
        ]
        self._stepped += core.stepped
        if self.log_grad_norm and core.grad_norm is not None:
            self._norms.append(core.grad_norm)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Logs what the step of this batch used; nothing for a micro-batch without a step."""
        if not self._used or not trainer._logger_connector.should_update_logs:
            return
        stats: dict[str, Any] = self._extract_stats(trainer, "any")
        extra: dict[str, float] = {}
        if self.log_grad_norm and self._norms:
            extra["grad_norm"] = float(torch.stack([norm.float().cpu() for norm in self._norms]).square().sum().sqrt())
        if self.log_stepped_parameters:
            extra["stepped_parameters"] = float(self._stepped)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in extra.items()})
        for logger in trainer.loggers:
            logger.log_metrics({**stats, **extra}, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Nothing: rates are logged per step."""

    @override
    def _get_optimizer_stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        groups = self._used.get(id(optimizer))
        if groups is None:
            return {}  # this optimizer made no step in this batch
        return super()._get_optimizer_stats(_Groups(groups, optimizer.defaults), names)  # type: ignore[arg-type]


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters; schedulers change a rate that is a tensor in place."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class _Groups:
    """What `LearningRateMonitor` reads of an optimizer."""

    def __init__(self, param_groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.param_groups = param_groups
        self.defaults = defaults


def _cores(trainer: Trainer) -> dict[int, OptimizerInBackward]:
    strategy = trainer.strategy
    if not isinstance(strategy, InBackwardStrategy):
        return {}
    return {id(core.optimizer): core for core in strategy.optimizers_in_backward}
