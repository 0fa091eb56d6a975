"""The manual-optimization path: a LightningModule whose batches step in `manual_backward`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor


class OptimInBwdMixin:
    """Trains a LightningModule in manual optimization while the optimizer is in backward.

    Put it before ``LightningModule``; ``training_step`` still just returns its loss. Under a strategy of this package
    with the mode on, each training batch runs as manual optimization: the mixin calls ``manual_backward``, which steps,
    and counts the step. ``automatic_optimization`` is ``False`` from the start of the batch to the end of its backward,
    and as declared everywhere else. With the mode off or under another strategy the module is an ordinary one.

    Raises:
        TypeError: at class creation, when the mixin comes after ``LightningModule``.

    Example::

        class Lit(OptimInBwdMixin, LightningModule):
            def training_step(self, batch, batch_idx):
                return self.loss(batch)
    """

    _declared_automatic = True
    _manual_path: _InBackwardBatch | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(OptimInBwdMixin):
            raise TypeError(
                f"`class {cls.__name__}` names `LightningModule` before `OptimInBwdMixin`, so that its"
                " `automatic_optimization` would hide the mixin's. Write"
                f" `class {cls.__name__}(OptimInBwdMixin, LightningModule)`."
            )

    @property
    def automatic_optimization(self) -> bool:
        """``False`` while a batch of the manual path has not finished its backward; else as declared."""
        return self._declared_automatic and not (self._manual_path is not None and self._manual_path.in_batch)

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self._declared_automatic = automatic

    @property
    def declared_automatic_optimization(self) -> bool:
        """What the module itself says; ``False``: its ``training_step`` calls ``manual_backward``."""
        return self._declared_automatic

    def _enter_manual_path(self) -> None:
        """Called by the strategy when the hooks are on."""
        if self._declared_automatic and self._manual_path is None:
            assert isinstance(self, LightningModule)
            self._manual_path = _InBackwardBatch(self.trainer)

    def _leave_manual_path(self) -> None:
        if self._manual_path is not None:
            self._manual_path.uninstall()
            self._manual_path = None


class _InBackwardBatch(_ManualOptimization):
    """Lightning's manual loop with the batch of its automatic loop inside (Lightning 2.6, private classes).

    The epoch loop runs it because `automatic_optimization` is `False` at that moment. Hooks are called as in the
    automatic loop, and the counters of both loops advance.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._replaced = self._epoch_loop.manual_optimization
        self.optim_step_progress = self._replaced.optim_step_progress
        self._finished_batch = -1
        # A checkpoint of the automatic loop has not counted here, one of the manual loop not there.
        automatic = self._epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = self.optim_step_progress.total
        for counter in ("ready", "completed"):
            steps = max(getattr(automatic, counter), getattr(manual, counter))
            setattr(automatic, counter, steps)
            setattr(manual, counter, steps)
        self._epoch_loop.manual_optimization = self

    def uninstall(self) -> None:
        self._epoch_loop.manual_optimization = self._replaced

    @property
    def in_batch(self) -> bool:
        """Whether a training batch has been started and its backward has not ended."""
        progress: Any = self._epoch_loop.batch_progress.total
        return progress.processed < progress.started == progress.ready != self._finished_batch

    @override
    def advance(self, kwargs: OrderedDict) -> None:
        automatic = self._epoch_loop.automatic_optimization
        batch_idx = self._epoch_loop.batch_idx
        optimizer = self.trainer.optimizers[0]
        closure = Closure(
            step_fn=automatic._make_step_fn(kwargs),
            backward_fn=self._backward,
            zero_grad_fn=automatic._make_zero_grad_fn(batch_idx, optimizer),
        )
        try:
            if self.trainer.fit_loop._should_accumulate():
                closure()
            else:
                automatic._optimizer_step(batch_idx, closure)
        finally:
            self._finish()
        result = closure.consume_result()
        self._output = {} if result.loss is None else result.asdict()

    def _backward(self, loss: Tensor) -> None:
        try:
            self.trainer.lightning_module.manual_backward(loss)
        finally:
            self._finish()

    def _finish(self) -> None:
        self._finished_batch = self._epoch_loop.batch_progress.total.ready
