"""What becomes of Lightning's gradient clipping, which would find no gradients, while the optimizer is in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_bwdopt import checks
from lightning_bwdopt.arguments import GradientClipping

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer


class TrainerClipping:
    """Disables, refuses or leaves to the core what ``Trainer(gradient_clip_val=…)`` and user code ask for.

    Both the Trainer's own clipping and ``self.clip_gradients`` in user code end in ``clip_gradients`` of the strategy's
    precision plugin: :meth:`take_over` puts its own there, :meth:`release` takes it away again.

    Args:
        treatment: ``"disable"``, ``"error"`` or ``"exact"``.
        trainer: Has the value and the module.
        warn: Warns once per fit; is given a topic and the text.

    Raises:
        MisconfigurationException: clipping is asked for that cannot be had.
    """

    def __init__(self, treatment: GradientClipping, trainer: Trainer, warn: Callable[[str, str], None]) -> None:
        self._treatment = treatment
        self._trainer = trainer
        self._warn = warn
        value, module = trainer.gradient_clip_val, trainer.lightning_module
        checks.check_clipping(value, treatment)
        checks.check_clipping_hook(module, treatment)
        self.exact: tuple[str, float] | None = None  # the core's `clip`
        if value and treatment == "exact":
            self.exact = (_kind(trainer.gradient_clip_algorithm), float(value))
            if self.exact[0] == "norm":
                checks.check_retain_graph(module)

    def take_over(self) -> None:
        """Keeps ``clip_gradients`` from torch."""
        value = self._trainer.gradient_clip_val
        if self._treatment == "disable":
            if value:
                self._warn_disabled(f"`gradient_clip_val={value}`")
            if is_overridden("configure_gradient_clipping", self._trainer.lightning_module):
                self._warn_disabled("in `configure_gradient_clipping`")
        self._trainer.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]

    def release(self) -> None:
        """Undoes :meth:`take_over`."""
        vars(self._trainer.precision_plugin).pop("clip_gradients", None)

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if not clip_val or clip_val <= 0:
            return
        checks.check_clipping(clip_val, self._treatment)
        if self._treatment == "disable":
            self._warn_disabled(f"`gradient_clip_val={clip_val}`")
        elif self.exact != (_kind(gradient_clip_algorithm), clip_val):
            raise checks.late_clipping(clip_val, _kind(gradient_clip_algorithm))

    def _warn_disabled(self, what: str) -> None:
        self._warn(
            "clipping",
            f"Gradient clipping ({what}) is disabled: the optimizer steps in backward, before the norm of all gradients"
            " is known. Pass `gradient_clipping='exact'` to the strategy to clip all the same, or `'error'` to be"
            " stopped here.",
        )


def _kind(algorithm: Any) -> str:
    """Lightning's `gradient_clip_algorithm`, a string enum or `None`, as the core names it."""
    return "value" if algorithm == "value" else "norm"
