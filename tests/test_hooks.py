from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from helpers import Lit
from observing import assert_same_runs

OPTIMIZATION = ["backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"]
HOOKS = [name for base in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(base) if not name.startswith("_")]
HOOKS += [*OPTIMIZATION, "configure_callbacks", "configure_optimizers", "training_step", "validation_step"]
_SKIPPED = ("on_test", "on_predict", "configure_sharded_model", "configure_model")
HOOKS = [name for name in HOOKS if not name.endswith("_dataloader") and not name.startswith(_SKIPPED)]


class Spied(Lit):
    """Every hook notes its name and what it sees, between the calls of the callbacks."""

    def note(self, name: str) -> None:
        trainer = self._trainer
        if trainer is None or not trainer.callbacks:
            return
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        trainer.callbacks[0].calls.append(
            (f"module.{name}", trainer.global_step, rates, self.training, torch.is_grad_enabled())
        )


def _noting(name: str) -> Any:
    def hook(self: Spied, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        return getattr(super(Spied, self), name)(*args, **kwargs)

    return hook


for _name in HOOKS:
    if hasattr(Lit, _name):
        setattr(Spied, _name, _noting(_name))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_are_called_as_often_and_in_the_same_order(accumulate: int, tmp_path: Any) -> None:
    run = assert_same_runs(
        Spied,
        folder=tmp_path,
        max_steps=-1,
        max_epochs=2,
        batches=5,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=1,
        gradient_clip_val=1e3,
        enable_checkpointing=True,
        options={"gradient_clipping": "disable"},
        ignore=(
            "`accumulate_grad_batches=",
            "Gradient clipping (in `configure_gradient_clipping`)",
            "Gradient clipping (`gradient_clip_val=1000.0`)",
        ),
    )
    names = {call[0] for call in run["hooks"]}
    assert {f"module.{name}" for name in OPTIMIZATION} <= names
    assert {"on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"} <= names
