"""The mode on Lightning's side: what both strategies do around `OptimizerInBackward`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt import checks, sharding
from lightning_bwdopt.clipping import NONFINITE_CHOICES, NonFinite, run_backward
from lightning_bwdopt.interruption import HalfAppliedStepError, allow_checkpoints, withhold_checkpoints
from lightning_bwdopt.mixin import InBackwardBatch, OptimInBwdMixin, configure_optimizers
from lightning_bwdopt.optimizer import OptimizerInBackward

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig

Granularity = Literal["unit", "parameter"]
GradientClipping = Literal["disable", "error", "exact"]


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
        checks.choice("granularity", granularity, ("unit", "parameter"))
        checks.choice("gradient_clipping", gradient_clipping, ("disable", "error", "exact"))
        checks.choice("on_nonfinite", on_nonfinite, NONFINITE_CHOICES)
        self.enabled = enabled
        self.granularity = granularity
        self.gradient_clipping = gradient_clipping
        self.on_nonfinite = on_nonfinite
        self.self_check = self_check
        self.optimizers_in_backward: list[OptimizerInBackward] = []
        self.step_half_applied = False  # an exception left a backward pass in which parameters may have moved
        self._blocks: list[nn.Module] = []
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
        clip = self._clip(trainer)
        for optimizer in self._real_optimizers():
            checks.foreign_parameters(optimizer, module)
            checks.trainable(optimizer)
            self.optimizers_in_backward.append(
                OptimizerInBackward(
                    optimizer,
                    sharding.units_of(module, self._blocks) if self.granularity == "unit" else None,
                    clip=clip,
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

    def _clip(self, trainer: Trainer) -> tuple[str, float] | None:
        value = trainer.gradient_clip_val
        checks.clipping(value, self.gradient_clipping)
        if not value or self.gradient_clipping != "exact":
            return None
        return (_kind(trainer.gradient_clip_algorithm), float(value))

    # The life of the hooks ------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if not self.optimizers_in_backward:
            return
        module = self.lightning_module
        assert module is not None
        names = {id(p): name for name, p in module.named_parameters()}
        for core in self.optimizers_in_backward:
            core.parameter_names = names
            core.attach(calls_step=True)
        self._take_over_clipping()
        if self._runs_manual_path():
            InBackwardBatch.install(module.trainer)

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
        self._detach()

    @override
    def teardown(self) -> None:
        self._detach()
        self._warned.clear()
        super().teardown()

    def _detach(self) -> None:
        self._release_schedulers()
        for core in self.optimizers_in_backward:
            core.remove()
        vars(self.precision_plugin).pop("clip_gradients", None)
        if (manual_path := InBackwardBatch.of(self.lightning_module)) is not None:
            manual_path.uninstall()

    # One step -------------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        cores = self._attached()
        if not cores:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        run = partial(self.precision_plugin.backward, loss, module, optimizer, *args, **kwargs)
        with self._noticing_interruption(), self._holding(cores), self._explaining():
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
            return super().training_step(*args, **kwargs)

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
        accumulates = module.trainer.fit_loop._should_accumulate()
        if accumulates:
            self._warn(
                "accumulate",
                f"`accumulate_grad_batches={module.trainer.accumulate_grad_batches}` with the optimizer in backward:"
                " the result is the ordinary run's, and the (sharded) gradients stay in memory between micro-batches.",
            )
        # Which optimizer a loss is for is the user's to say: a GAN's generator loss also reaches the discriminator.
        untold = len(cores) > 1 and self._is_user_manual() and not module._param_requires_grad_state
        if untold:
            self._warn(
                "toggle",
                f"`manual_backward` was called with {len(cores)} optimizers and none toggled: gradients are held until"
                " each optimizer's own `step()`, as in the ordinary run, and no memory is saved. Call"
                " `self.toggle_optimizer(optimizer)` before the forward pass of its loss to have it step in backward.",
            )
        with ExitStack() as stack:
            if accumulates or untold:
                for core in cores:
                    stack.enter_context(core.accumulate())
            yield

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                "This backward needs parameters as they were before an earlier backward of the same step, which has"
                " stepped them. Sum the losses and call backward once. (autograd says: a tensor was modified by an"
                " inplace operation.)"
            ) from error

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
            raise HalfAppliedStepError
        return super().lightning_module_state_dict()

    # Clipping -------------------------------------------------------------------------------------------------------

    def _take_over_clipping(self) -> None:
        """Keeps `clip_gradients` from torch, which would find no gradients, while the hooks are on.

        Both the Trainer's own clipping and ``self.clip_gradients`` in user code end in the precision plugin, an object
        of this strategy; its attribute is deleted again in `_detach`.
        """
        module = self.lightning_module
        assert module is not None
        value = module.trainer.gradient_clip_val
        if self.gradient_clipping == "disable":
            if value:
                self._warn_clipping_disabled(value)
            if is_overridden("configure_gradient_clipping", module):
                self._warn_clipping_disabled("in `configure_gradient_clipping`")
        elif is_overridden("configure_gradient_clipping", module):
            raise MisconfigurationException(
                f"`{type(module).__name__}.configure_gradient_clipping` is overridden, and it would be called when the"
                f" gradients are gone (`gradient_clipping={self.gradient_clipping!r}`). Remove it and use"
                " `gradient_clip_val`, or pass `gradient_clipping='disable'`."
            )
        if self._clip(module.trainer) and self._clip(module.trainer)[0] == "norm":  # type: ignore[index]
            checks.takes_retain_graph(module)
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if not clip_val or clip_val <= 0:
            return
        module = self.lightning_module
        assert module is not None
        if self.gradient_clipping == "disable":
            self._warn_clipping_disabled(clip_val)
        elif self.gradient_clipping == "error":
            checks.clipping(clip_val, "error")
        elif self._clip(module.trainer) != (_kind(gradient_clip_algorithm), clip_val):
            raise MisconfigurationException(
                f"`clip_gradients({clip_val}, {_kind(gradient_clip_algorithm)!r})` came after the optimizer had stepped"
                " in backward. Set `Trainer(gradient_clip_val=…)` instead, which `gradient_clipping='exact'` clips by"
                " before the step, and have `training_step` return its loss (`OptimInBwdMixin` for the manual loop):"
                " Lightning does not take it for a module that calls `manual_backward` itself."
            )

    def _warn_clipping_disabled(self, value: Any) -> None:
        self._warn(
            "clipping",
            f"Gradient clipping ({value if isinstance(value, str) else f'`gradient_clip_val={value}`'}) is disabled:"
            " the optimizer steps in backward, before the norm of all gradients is known. Pass"
            " `gradient_clipping='exact'` to the strategy to clip all the same, or `'error'` to be stopped here.",
        )

    def _warn(self, topic: str, message: str) -> None:
        """Warns once per fit."""
        if topic not in self._warned:
            self._warned.add(topic)
            rank_zero_warn(message)


def _kind(algorithm: Any) -> str:
    """Lightning's `gradient_clip_algorithm`, a string enum or `None`, as the core names it."""
    return "value" if algorithm == "value" else "norm"
