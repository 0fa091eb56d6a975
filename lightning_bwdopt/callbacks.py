"""Callbacks that look at a run with the optimizer in backward, or at an ordinary one beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt import plots
from lightning_bwdopt.clipping import total_norm
from lightning_bwdopt.mode import InBackwardStrategy
from lightning_bwdopt.process_memory import memory_reader
from lightning_bwdopt.timeline import Recording, read_csv, write_csv

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_bwdopt.optimizer import OptimizerInBackward

# The runs that are laid side by side.
MODES = ("ordinary", "in backward")


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
        if not trainer.loggers:  # `LearningRateMonitor` would say so of itself
            raise MisconfigurationException(
                "`OptimInBwdMonitor` has nowhere to log to: the Trainer has no logger. Pass one, or leave it out."
            )
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
        if core is None or core.has_held_gradients:  # it steps in `optimizer.step()`, which comes after this
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


class MemoryTimeline(Callback):
    """Records the memory of this rank over one training step, as a CSV file and a picture.

    Samples every millisecond: on CUDA what the allocator has given out on the rank's device, elsewhere the resident set
    of the process; and the gradients that are alive. Forward, backward and each unit's step (in an ordinary run, the
    optimizer's) are marked. It works in ordinary runs, too, and under any strategy; at every other step it does nothing
    and has nothing hooked to the model.

    Each rank writes ``memory_step1_in_backward_rank0.csv``, or ``…_ordinary_…``, and a ``.png`` of the same name. Give
    an ordinary and an in-backward run the same ``dirpath``: the later one draws both pictures, on the same axes.

    Args:
        step: The step to record, as ``trainer.global_step`` counts: 0 is the first, in which the optimizer also makes
            its state. All its micro-batches are recorded.
        dirpath: The folder to write to; ``None``: the logger's, or ``default_root_dir``.
        draw: Also draw the picture, for which matplotlib is needed.

    Attributes:
        file: The CSV file, once it is written.

    Raises:
        TypeError: ``step`` is not a whole number.
        ValueError: ``step`` is negative.
        RuntimeError: when training begins, on a system whose resident set cannot be read.

    Example::

        Trainer(callbacks=[MemoryTimeline(step=5)], strategy="fsdp_optim_in_bwd")
    """

    def __init__(self, step: int = 1, dirpath: str | Path | None = None, draw: bool = True) -> None:
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"`step={step!r}` is not a whole number. Pass the `global_step` to record, such as 1.")
        if step < 0:
            raise ValueError(f"`step={step}` is before the first step. Pass the `global_step` to record, 0 or more.")
        self.step = step
        self.dirpath = dirpath
        self.draw = draw
        self.file: Path | None = None
        self._recording: Recording | None = None
        self._begun_at = 0  # the `global_step` at which the recording began
        self._handles: list[Any] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What cannot work fails now and not at the step.
        memory_reader(trainer.strategy.root_device)
        self._folder(trainer).mkdir(parents=True, exist_ok=True)
        self.file = None
        if self._is_past(trainer):
            rank_zero_warn(
                f"`MemoryTimeline(step={self.step})` records nothing: this run goes on from step {trainer.global_step}."
                " Pass a later step."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._recording is not None:
            self._recording.enter("forward")  # of the step's next micro-batch
        elif self.file is None and trainer.global_step >= self.step and not self._is_past(trainer):
            self._begin(trainer, pl_module)

    def _is_past(self, trainer: Trainer) -> bool:
        """Whether the step has been. With several optimizers a batch may count several, and begin beyond it."""
        return trainer.global_step - self.step >= max(1, len(trainer.optimizers))

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        parameters = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        recording = Recording(memory_reader(trainer.strategy.root_device), parameters)
        for core in _cores(trainer).values():
            self._handles.append(core.register_unit_step_hooks(recording.before_step, recording.after_step))
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(partial(self._on_optimizer_stepped, trainer)))
        for _, param in parameters:
            self._handles.append(param.register_post_accumulate_grad_hook(recording.on_gradient))
        self._recording, self._begun_at = recording, trainer.global_step

    def _on_optimizer_stepped(self, trainer: Trainer, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._recording is None:
            return
        if id(optimizer) not in _cores(trainer):
            self._recording.note("step ends", type(optimizer).__name__)
        self._recording.enter("")

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.enter("backward")

    @override
    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.enter("")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._recording is None:
            return
        core = _cores(trainer).get(id(optimizer))
        if core is None or core.has_held_gradients:
            self._recording.enter("optimizer step")
        if core is None:  # otherwise its units say when they step
            self._recording.note("step begins", type(optimizer).__name__)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        # Micro-batches count no step, be it the Trainer that accumulates or user code.
        if self._recording is None or trainer.global_step == self._begun_at:
            return
        recording = self._recording
        self._end()
        folder = self._folder(trainer)
        files = {
            mode: folder / f"memory_step{self.step}_{mode.replace(' ', '_')}_rank{trainer.global_rank}.csv"
            for mode in MODES
        }
        self.file = files["in backward" if _cores(trainer) else "ordinary"]
        write_csv(recording.samples, self.file)
        if self.draw:
            self._draw(trainer, {mode: file for mode, file in files.items() if file.exists()})

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)

    def _draw(self, trainer: Trainer, files: dict[str, Path]) -> None:
        try:
            plots.need_matplotlib("MemoryTimeline")
        except ModuleNotFoundError as error:
            rank_zero_warn(f"{error} The figures are in `{self.file}`.")
            return
        timelines = {f"{mode}, step {self.step}, rank {trainer.global_rank}": read_csv(files[mode]) for mode in files}
        device = trainer.strategy.root_device
        memory = f"allocated on {device}" if device.type == "cuda" else "resident set"
        pictures = [file.with_suffix(".png") for file in files.values()]
        for figure, picture in zip(plots.draw_timelines(timelines, memory), pictures, strict=True):
            figure.savefig(picture, dpi=110)
        rank_zero_info(f"The memory of step {self.step} is drawn in {', '.join(map(str, pictures))}.")

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    @override
    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._end()  # where `on_train_batch_start` has skipped the rest of the epoch

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        if self.file is None and not self._is_past(trainer):
            rank_zero_warn(
                f"`MemoryTimeline(step={self.step})` has recorded nothing: the training ended after"
                f" {trainer.global_step} steps. Pass an earlier step."
            )

    @override
    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._end()


def _cores(trainer: Trainer) -> dict[int, OptimizerInBackward]:
    strategy = trainer.strategy
    if not isinstance(strategy, InBackwardStrategy):
        return {}
    return {id(core.optimizer): core for core in strategy.optimizers_in_backward}
