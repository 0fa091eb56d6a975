"""The manual-optimization path: a LightningModule whose batches step in `manual_backward`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core import optimizer as lightning_optimizer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_bwdopt import checks
from lightning_bwdopt.counters import equalize
from lightning_bwdopt.loops import accumulates

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from torch import Tensor
    from torch.optim import Optimizer


class OptimInBwdMixin:
    """Trains a LightningModule in manual optimization while the optimizer is in backward.

    Put it before ``LightningModule``; ``training_step`` still just returns its loss. Under a strategy of this package
    with the mode on, each training batch runs as manual optimization: the mixin calls ``manual_backward``, which steps,
    and counts the step. ``automatic_optimization`` is ``False`` from the start of the batch to the end of its backward,
    and as declared everywhere else. With the mode off or under another strategy the module is an ordinary one.
    A module that declares ``automatic_optimization = False`` calls ``manual_backward`` and ``step`` itself; one that
    only returns its losses trains nothing, and is warned of.

    Raises:
        TypeError: at class creation, when the mixin comes after ``LightningModule``.

    Example::

        class Lit(OptimInBwdMixin, LightningModule):
            def training_step(self, batch, batch_idx):
                return self.loss(batch)
    """

    _declared_automatic = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(OptimInBwdMixin):
            raise checks.base_order(cls.__name__)

    @property
    def automatic_optimization(self) -> bool:
        """``False`` while a batch of the manual path has not finished its backward; else as declared."""
        batch = InBackwardBatch.of(self)
        return self._declared_automatic and not (batch is not None and batch.in_progress)

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self._declared_automatic = automatic

    @property
    def declared_automatic_optimization(self) -> bool:
        """What the module itself says; ``False``: its ``training_step`` calls ``manual_backward``."""
        return self._declared_automatic

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state of each optimizer, as the Trainer's checkpoints have it, to a dict that has none.

        When the Trainer saves, the state is there before it calls this (or it saves weights only).
        """
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        if not _from_trainer(checkpoint) and "optimizer_states" not in checkpoint:
            strategy = self.trainer.strategy  # type: ignore[attr-defined]
            checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the optimizers from what :meth:`on_save_checkpoint` made of an empty dict.

        When the Trainer loads, it loads them itself.
        """
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        if not _from_trainer(checkpoint) and "optimizer_states" in checkpoint:
            self.trainer.strategy.load_optimizer_state_dict(checkpoint)  # type: ignore[attr-defined]


def _from_trainer(checkpoint: dict[str, Any]) -> bool:
    return "state_dict" in checkpoint or "loops" in checkpoint


class InBackwardBatch(_ManualOptimization):
    """Lightning's manual loop with the batch of its automatic loop inside (Lightning 2.6, private classes).

    The epoch loop runs it because `automatic_optimization` is `False` at that moment. Hooks are called as in the
    automatic loop, and both loops count the step in one counter.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._awaited_batch = -1  # the count of started batches that the batch to come will make

    @staticmethod
    def of(module: Any) -> InBackwardBatch | None:
        """The one that a LightningModule's Trainer runs at this moment, if any."""
        trainer = getattr(module, "_trainer", None)
        loop = None if trainer is None else trainer.fit_loop.epoch_loop.manual_optimization
        return loop if isinstance(loop, InBackwardBatch) else None

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """Puts it in the place of the Trainer's own manual loop."""
        epoch_loop = trainer.fit_loop.epoch_loop
        batch = cls(trainer)
        # A checkpoint of the automatic loop has not counted in the manual one, nor the other way round.
        manual = epoch_loop.manual_optimization.optim_step_progress
        shared = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        equalize(vars(shared.total), vars(manual.total))
        batch.optim_step_progress = shared
        epoch_loop.manual_optimization = batch

    def uninstall(self) -> None:
        """Gives the Trainer a manual loop of its own again."""
        stock = _ManualOptimization(self.trainer)
        stock.optim_step_progress = copy.deepcopy(self.optim_step_progress)
        self._epoch_loop.manual_optimization = stock

    @property
    def _epoch_loop(self) -> _TrainingEpochLoop:
        # No attribute: `_Loop.state_dict` looks into every attribute that is a loop, and this one would be a cycle.
        return self.trainer.fit_loop.epoch_loop

    def await_batch(self) -> None:
        """The next training batch is about to start, unless `on_train_batch_start` has skipped it."""
        self._awaited_batch = self._started_batches + 1

    @property
    def in_progress(self) -> bool:
        """Whether a training batch has been started and its backward has not ended."""
        return self._started_batches == self._awaited_batch

    @property
    def _started_batches(self) -> int:
        progress: Any = self._epoch_loop.batch_progress.total
        return progress.started

    def _finish(self) -> None:
        self._awaited_batch = -1

    @override
    def on_run_start(self) -> None:
        """Nothing: steps are counted here, not in `LightningOptimizer.step`, which not every batch calls once."""

    @override
    def advance(self, kwargs: OrderedDict) -> None:
        trainer = self.trainer
        automatic = self._epoch_loop.automatic_optimization
        batch_idx = self._epoch_loop.batch_idx
        skips_backward = automatic._skip_backward
        training_step = automatic._make_step_fn(kwargs)

        def step() -> ClosureResult:
            result = training_step()
            if skips_backward or result.closure_loss is None:
                self._finish()
            return result

        closure = Closure(
            step_fn=step,
            backward_fn=None if skips_backward else self._backward,
            zero_grad_fn=automatic._make_zero_grad_fn(batch_idx, trainer.optimizers[0]),
        )
        try:
            if accumulates(trainer):
                closure()
            else:
                automatic._optimizer_step(batch_idx, closure)
                self._finish()
                for optimizer in trainer.strategy._lightning_optimizers[1:]:  # stepped in the backward, too
                    hook = (trainer.current_epoch, batch_idx, optimizer, lightning_optimizer.do_nothing_closure)
                    _call_lightning_module_hook(trainer, "optimizer_step", *hook)
        finally:
            self._finish()
        result = closure.consume_result()
        self._output = {} if result.loss is None else result.asdict()

    def _backward(self, loss: Tensor) -> None:
        trainer: Any = self.trainer  # mypy does not see `Trainer.profiler`
        action = f"[Strategy]{type(trainer.strategy).__name__}.backward"  # as the automatic loop's profile has it
        try:
            with trainer.profiler.profile(action):
                trainer.lightning_module.manual_backward(loss)
        finally:
            self._finish()


def configure_optimizers(module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """What Lightning's `_init_optimizers_and_lr_schedulers` does (2.6), except that it refuses several optimizers.

    Automatic optimization would not know which of them a loss is for; here all of them step in its backward.
    """
    configured = _call_lightning_module_hook(module.trainer, "configure_optimizers", pl_module=module)
    if configured is None:
        rank_zero_warn("`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer")
        configured = lightning_optimizer._MockOptimizer()
    optimizers, schedulers, monitor = lightning_optimizer._configure_optimizers(configured)
    configs = lightning_optimizer._configure_schedulers_automatic_opt(schedulers, monitor)
    lightning_optimizer._validate_optimizers_attached(optimizers, configs)
    lightning_optimizer._validate_scheduler_api(configs, module)
    return optimizers, configs
