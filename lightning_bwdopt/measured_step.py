"""The memory of one steady training step of a running Trainer, on real tensors or on fake ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_bwdopt import memory, sharding
from lightning_bwdopt.mode import InBackwardStrategy
from lightning_bwdopt.units import describe_units, named_units
from lightning_bwdopt.views import local_tensor

# The first step creates the optimizer's state; the second is like all that follow.
STEPS = 2


@dataclass(frozen=True)
class StepMemory:
    """What one rank held in a steady step.

    Attributes:
        peaks: The moment of the most in each phase of the step.
        curve: The phase, and the bytes alive, after each operation of the step.
        layer_gradient: Bytes of the gradients of the largest repeated block, or of the whole model without blocks.
        trainable: The share of the parameters' bytes that is trained, 0 to 1.
        model: The class of the LightningModule.
        strategy: The class of the strategy.
        world_size: Ranks.
        units: What steps together, with sizes.
    """

    peaks: dict[memory.Phase, memory.Peak]
    curve: list[tuple[memory.Phase, int]]
    layer_gradient: int
    trainable: float
    model: str
    strategy: str
    world_size: int
    units: str

    @property
    def phase(self) -> memory.Phase:
        """The phase of the peak."""
        return memory.highest(self.peaks)

    @property
    def peak(self) -> memory.Peak:
        """The peak of the step."""
        return self.peaks[self.phase]

    @property
    def most(self) -> int:
        """The bytes that the step needs: the most over all phases."""
        return max(peak.bytes for peak in self.peaks.values())


class MeasuredStep(Callback):
    """Counts the tensors of the second optimizer step, and stops the training after it.

    Args:
        around_batch: Makes a context that each batch runs in, inside of which the tensors are counted.
    """

    def __init__(self, around_batch: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._around_batch = around_batch
        self._tracker = memory.MemoryTracker()
        self._in_batch = ExitStack()
        self._begun_at: int | None = None  # the `global_step` of the step that is made; none between steps
        self._steps = 0
        self._labels: dict[int, str] = {}  # id(parameter) -> the block that it is in
        self._facts: dict[str, Any] = {}
        self._model = ""

    def result(self) -> StepMemory:
        """What was measured.

        Raises:
            ValueError: training ended before there was a steady step.
        """
        if self._steps < STEPS:
            raise ValueError(
                f"The training ended after {self._steps} optimizer steps, and the steady state begins with step"
                f" {STEPS}. Give it more batches (`limit_train_batches`)."
            )
        return StepMemory(peaks=self._tracker.peaks, curve=self._tracker.curve, **self._facts)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._model = type(pl_module).__name__  # `fully_shard` is about to change the class

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the strategy's own `on_train_start`: its hooks come after these, which so see every gradient.
        for tensor in (*pl_module.parameters(), *pl_module.buffers()):
            self._tracker.watch(tensor, "parameters")
        for param in pl_module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._on_gradient)
        self._look_at(trainer, pl_module)

    def _look_at(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InBackwardStrategy)
        params = dict(module.named_parameters())
        sizes = {name: local_tensor(p).nbytes for name, p in params.items()}
        trained = {name: size for name, size in sizes.items() if params[name].requires_grad}
        blocks = {
            name: sum(size for param, size in trained.items() if param.startswith(f"{name}."))
            for name, child in module.named_modules()
            if child is not module
            and (isinstance(child, sharding.FSDPModule) or any(child is block for block in strategy._blocks))
        }
        for name, param in params.items():
            self._labels[id(param)] = max((b for b in blocks if name.startswith(f"{b}.")), key=len, default="")
        self._facts = {
            "layer_gradient": max(blocks.values(), default=sum(trained.values())),
            "trainable": sum(trained.values()) / max(1, sum(sizes.values())),
            "model": self._model,
            "strategy": type(strategy).__name__,
            "world_size": trainer.world_size,
            "units": describe_units(named_units(module, strategy._blocks)),
        }

    def _on_gradient(self, param: Tensor) -> None:
        assert param.grad is not None
        self._tracker.watch(param.grad, "gradients")
        self._tracker.after = self._labels.get(id(param), "")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        memory.each_tensor(batch, lambda tensor: self._tracker.watch(tensor, "activations"))
        self._tracker.phase, self._tracker.after = "forward", ""
        if self._begun_at is None:
            self._begun_at = trainer.global_step
            if self._steps == STEPS - 1:
                self._tracker.restart()
        self._in_batch.enter_context(self._around_batch())
        self._in_batch.enter_context(self._tracker)

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._tracker.phase = "backward"

    @override
    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._tracker.phase = "optimizer step"

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._in_batch.close()
        for optimizer in trainer.optimizers:
            for entry in optimizer.state.values():
                memory.each_tensor(entry, lambda tensor: self._tracker.watch(tensor, "optimizer_state"))
        if trainer.global_step == self._begun_at:
            return  # a micro-batch, be it the Trainer that accumulates or user code
        self._begun_at = None
        self._steps += 1
        trainer.should_stop = self._steps == STEPS

    @override
    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._in_batch.close()
