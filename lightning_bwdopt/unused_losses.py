"""A slip that trains nothing without a word: manual optimization that never calls backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_bwdopt.optimizer import OptimizerInBackward

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

PATIENCE = 10  # batches; a module may leave out some at the start


class UnusedLosses:
    """Watches a module of the mixin that sets ``automatic_optimization = False``, until its first backward.

    Such a module has to call ``manual_backward`` itself. One that returns its losses instead, as the mixin has it
    everywhere else, trains nothing, and neither does it in an ordinary run; Lightning does not say so.

    Args:
        module: Is named in the warning.
        cores: Know of a ``loss.backward()`` that the strategy does not see.
        warn: Warns once per fit; is given a topic and the text.
    """

    def __init__(
        self, module: LightningModule, cores: Sequence[OptimizerInBackward], warn: Callable[[str, str], None]
    ) -> None:
        self._module = module
        self._cores = cores
        self._warn = warn
        self._first_step = module.trainer.global_step
        self._count: int | None = 0  # `None`: a backward has come

    def note_backward(self) -> None:
        """The module knows what it has to do."""
        self._count = None

    def note_output(self, output: Any) -> None:
        """Looks at what ``training_step`` has returned."""
        if any(core.stepped or core.steps > self._first_step for core in self._cores):
            self.note_backward()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._count is None or not (isinstance(loss, Tensor) and loss.requires_grad):
            return
        self._count += 1
        if self._count == PATIENCE:
            self.tell()

    def tell(self) -> None:
        """Warns of the losses so far; at the end of training, of fewer ones than it would wait for."""
        if self._count:
            name = type(self._module).__name__
            self._warn(
                "unused losses",
                f"`{name}` sets `automatic_optimization = False`, so that its `training_step` has to call"
                f" `self.manual_backward(loss)` and `step()`; it has returned {self._count} losses and called neither:"
                " nothing is trained. Leave `automatic_optimization` as it is, and `OptimInBwdMixin` runs the backward"
                " of the returned loss in manual optimization; or call both.",
            )
