"""A step that an exception has left half applied is not saved: no ordinary run has such weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_bwdopt.checks import HalfAppliedStepError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


def withhold_checkpoints(trainer: Trainer) -> None:
    """Has callbacks that save when an exception ends the run warn instead, so that the exception itself survives."""
    for callback in _savers(trainer):
        callback.on_exception = partial(_warn_instead, callback.on_exception, type(callback).__name__)  # type: ignore[method-assign]


def allow_checkpoints(trainer: Trainer) -> None:
    """Undoes :func:`withhold_checkpoints`."""
    for callback in _savers(trainer):
        vars(callback).pop("on_exception", None)


def _savers(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # anything may save in `on_exception`


def _warn_instead(on_exception: Callable[..., None], name: str, *args: Any) -> None:
    try:
        on_exception(*args)
    except HalfAppliedStepError as error:
        rank_zero_warn(f"`{name}` saved no checkpoint on this exception. {error}")
