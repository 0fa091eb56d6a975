"""The mode on Lightning's side: what both strategies do around `OptimizerInBackward`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt import checks, sharding, states
from lightning_bwdopt.arguments import GradientClipping, Granularity, NonFinite, check_choice, check_flag
from lightning_bwdopt.interruption import allow_checkpoints, withhold_checkpoints
from lightning_bwdopt.loops import accumulates, toggled
from lightning_bwdopt.mixin import InBackwardBatch, OptimInBwdMixin, configure_optimizers
from lightning_bwdopt.optimizer import OptimizerInBackward
from lightning_bwdopt.passes import run_backward
from lightning_bwdopt.trainer_clipping import TrainerClipping
from lightning_bwdopt.units import describe_units, units_of
from lightning_bwdopt.unused_losses import UnusedLosses
from lightning_bwdopt.views import local_tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class InBackwardStrategy(Strategy):
    """Base of the strategies: attaches the cores when training starts, routes backward, detaches when it ends.

    It works on `Strategy` hooks alone; a subclass adds where parameters live.
    """

    def _init_mode(
        self,
        enabled: bool,
        granularity: Granularity,
        gradient_clipping: GradientClipping,
        on_nonfinite: NonFinite,
        self_check: bool,
    ) -> None:
        check_flag("enabled", enabled)
        check_flag("self_check", self_check)
        check_choice("granularity", granularity, Granularity)
        check_choice("gradient_clipping", gradient_clipping, GradientClipping)
        check_choice("on_nonfinite", on_nonfinite, NonFinite)
        self.enabled = enabled
        self.granularity = granularity
        self.gradient_clipping = gradient_clipping
        self.on_nonfinite = on_nonfinite
        self.self_check = self_check
        self.optimizers_in_backward: list[OptimizerInBackward] = []
        self.step_half_applied = False  # an exception left a backward pass in which parameters may have moved
        self._blocks: list[nn.Module] = []
        self._clipping: TrainerClipping | None = None
        self._unused_losses: UnusedLosses | None = None  # of a module of the mixin that steps by itself
        self._warned: set[str] = set()
        self._frequencies: dict[int, tuple[LRSchedulerConfig, int]] = {}  # of schedulers that wait for this batch

    # Setting up -----------------------------------------------------------------------------------------------------

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._build_optimizers(trainer)
        self.optimizers_in_backward = []
        self.step_half_applied = False
        if not self.enabled:
            return
        module = self.lightning_module
        assert module is not None
        self._clipping = TrainerClipping(self.gradient_clipping, trainer, self._warn)
        for optimizer in self._real_optimizers():
            checks.check_foreign_parameters(optimizer, module)
            self.optimizers_in_backward.append(
                OptimizerInBackward(
                    optimizer,
                    units_of(module, self._blocks) if self.granularity == "unit" else None,
                    clip=self._clipping.exact,
                    on_nonfinite=self.on_nonfinite,
                    self_check=self.self_check,
                )
            )

    def _build_optimizers(self, trainer: Trainer) -> None:
        if self._runs_manual_path():
            assert isinstance(self.lightning_module, OptimInBwdMixin)
            self.optimizers, self.lr_scheduler_configs = configure_optimizers(self.lightning_module)
        else:
            super().setup_optimizers(trainer)

    def _real_optimizers(self) -> list[Optimizer]:
        """Without Lightning's stand-in for `configure_optimizers` returning `None`."""
        return [optimizer for optimizer in self.optimizers if not isinstance(optimizer, _MockOptimizer)]

    # The life of the hooks ------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if not self.optimizers_in_backward:
            return
        module = self.lightning_module
        assert module is not None
        sharding.reshard(module)
        names = states.parameter_names(module)
        for core in self.optimizers_in_backward:
            core.parameter_names = names
            core.attach(calls_step=True)
        assert self._clipping is not None
        self._clipping.take_over()
        if self._runs_manual_path():
            InBackwardBatch.install(module.trainer)
        elif isinstance(module, OptimInBwdMixin):
            self._unused_losses = UnusedLosses(module, self.optimizers_in_backward, self._warn)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._release_schedulers()
        for core in self._attached():
            core.steps = self.lightning_module.trainer.global_step  # type: ignore[union-attr]
            core.attach()  # picks up what a callback has unfrozen or added
        if (manual_path := InBackwardBatch.of(self.lightning_module)) is not None:
            manual_path.await_batch()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._unused_losses is not None:
            self._unused_losses.tell()
        self._detach()

    @override
    def teardown(self) -> None:
        self._detach()
        self._warned.clear()
        super().teardown()

    def _detach(self) -> None:
        self._release_schedulers()
        self._unused_losses = None
        for core in self.optimizers_in_backward:
            core.remove()
        if self._clipping is not None:
            self._clipping.release()
        if (manual_path := InBackwardBatch.of(self.lightning_module)) is not None:
            manual_path.uninstall()

    # One step -------------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        cores = self._attached()
        if not cores:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._unused_losses is not None:
            self._unused_losses.note_backward()
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        run = partial(self.precision_plugin.backward, loss, module, optimizer, *args, **kwargs)
        with self._noticing_interruption(), self._holding(cores), self._explaining(cores):
            if not run_backward(cores, loss, run):
                self._hold_schedulers()
        closure_loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._noticing_interruption():
            return super().optimizer_step(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._noticing_interruption():  # of a module that calls `manual_backward` itself
            output = super().training_step(*args, **kwargs)
        if self._unused_losses is not None:
            self._unused_losses.note_output(output)
        return output

    def _hold_schedulers(self) -> None:
        """A step that was left out is none for the schedulers, which Lightning steps after each batch.

        Lightning has no hook that decides it; it steps a scheduler when the batch's number divides by its frequency.
        """
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                self._frequencies.setdefault(id(config), (config, config.frequency))
                config.frequency = sys.maxsize

    def _release_schedulers(self) -> None:
        for config, frequency in self._frequencies.values():
            config.frequency = frequency
        self._frequencies.clear()

    @contextmanager
    def _holding(self, cores: list[OptimizerInBackward]) -> Iterator[None]:
        """Holds the gradients where they may not be used yet."""
        module = self.lightning_module
        assert module is not None
        held = accumulates(module.trainer)
        if held:
            self._warn(
                "accumulate",
                f"`accumulate_grad_batches={module.trainer.accumulate_grad_batches}` with the optimizer in backward:"
                " the result is the ordinary run's, and the (sharded) gradients stay in memory between micro-batches.",
            )
        # Which optimizer a loss is for is the user's to say: a GAN's generator loss also reaches the discriminator.
        untold = len(cores) > 1 and self._is_user_manual() and not toggled(module)
        if untold:
            self._warn(
                "toggle",
                f"`manual_backward` was called with {len(cores)} optimizers and none toggled: gradients are held until"
                " each optimizer's own `step()`, as in the ordinary run, and no memory is saved. Call"
                " `self.toggle_optimizer(optimizer)` before the forward pass of its loss to have it step in backward.",
            )
        with ExitStack() as stack:
            if held or untold:
                for core in cores:
                    stack.enter_context(core.accumulate())
            yield

    @contextmanager
    def _explaining(self, cores: list[OptimizerInBackward]) -> Iterator[None]:
        """Says more than autograd can where a step may be what has modified a tensor that the graph needs."""
        before = sum(core.stepped for core in cores)
        try:
            yield
        except RuntimeError as error:
            moved = sum(core.stepped for core in cores)
            if "modified by an inplace operation" not in str(error) or not moved:
                raise
            raise checks.stepped_before_backward() if before else checks.stepped_in_backward(moved) from error

    def _runs_manual_path(self) -> bool:
        """Whether the mixin runs the batches."""
        return self.enabled and isinstance(self.lightning_module, OptimInBwdMixin) and not self._is_user_manual()

    def _attached(self) -> list[OptimizerInBackward]:
        return [core for core in self.optimizers_in_backward if core.attached]

    def _is_user_manual(self) -> bool:
        module = self.lightning_module
        assert module is not None
        if isinstance(module, OptimInBwdMixin):
            return not module.declared_automatic_optimization
        return not module.automatic_optimization

    # A step half applied --------------------------------------------------------------------------------------------

    @contextmanager
    def _noticing_interruption(self) -> Iterator[None]:
        """On an exception, or Ctrl-C, remembers whether parameters have moved in a step that has not ended."""
        try:
            yield
        except BaseException:
            if not self.step_half_applied and any(core.stepped for core in self._attached()):
                self.step_half_applied = True
                assert self.lightning_module is not None
                withhold_checkpoints(self.lightning_module.trainer)
            raise

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.step_half_applied and self.lightning_module is not None:
            allow_checkpoints(self.lightning_module.trainer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The first of the strategy that `Trainer.save_checkpoint` calls: before anything is gathered from other ranks.
        if self.step_half_applied or any(core.stepped for core in self._attached()):
            raise checks.half_applied_step()
        return super().lightning_module_state_dict()

    def _warn(self, topic: str, message: str) -> None:
        """Warns once per fit."""
        if topic not in self._warned:
            self._warned.add(topic)
            rank_zero_warn(message)


def log_units(units: list[tuple[str, list[Tensor]]]) -> None:
    """Says once, at start, what steps together, and what little there is to gain where most is frozen."""
    rank_zero_info(f"{describe_units(units)}.")
    params = [p for _, unit in units for p in unit]
    trainable = [p for p in params if p.requires_grad]
    total, moving = (sum(p.numel() for p in some) for some in (params, trainable))
    if moving < total / 2:
        size = sum(local_tensor(p).nbytes for p in trainable)
        rank_zero_info(
            f"{moving:,} of {total:,} parameters ({moving / total:.1%}) are trainable. Their gradients take"
            f" {size / 2**20:.1f} MiB on this rank, which is all that the optimizer in backward can save here."
        )
