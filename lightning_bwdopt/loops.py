"""What Lightning's training loops know and do not say publicly."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def accumulates(trainer: Trainer) -> bool:
    """Whether the gradients of this batch wait for a later one's (``accumulate_grad_batches``)."""
    return trainer.fit_loop._should_accumulate()


def toggled(module: LightningModule) -> bool:
    """Whether ``toggle_optimizer`` has frozen what the other optimizers train."""
    return bool(module._param_requires_grad_state)
