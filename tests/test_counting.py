from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint

from observing import assert_same_runs


def _checkpoint(**kwargs: Any) -> Any:
    return lambda: [ModelCheckpoint(save_top_k=-1, **kwargs)]


SCENARIOS: dict[str, dict[str, Any]] = {
    "max_steps inside an epoch": {"max_steps": 5},
    "max_steps beyond an epoch": {"max_steps": 20, "batches": 8},
    "max_epochs": {"max_steps": -1, "max_epochs": 2, "batches": 4},
    "min_steps": {
        "max_steps": 9,
        "min_steps": 7,
        "batches": 3,
        "callbacks": lambda: [EarlyStopping("loss", patience=0, mode="max", check_on_train_epoch_end=True)],
    },
    "accumulation with a short last window": {
        "max_steps": -1,
        "max_epochs": 2,
        "batches": 7,
        "accumulate_grad_batches": 3,
    },
    "accumulation by epoch": {
        "max_steps": -1,
        "max_epochs": 3,
        "batches": 5,
        "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})],
    },
    "val_check_interval": {"max_steps": 7, "val_check_interval": 2},
    "log_every_n_steps": {"max_steps": 7, "log_every_n_steps": 3},
    "limit_train_batches": {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3},
    "overfit_batches": {"max_steps": -1, "max_epochs": 2, "overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": 3},
    "sanity checking": {"max_steps": 3, "num_sanity_val_steps": 2},
    "max_time": {"max_steps": 4, "max_time": {"hours": 1}},
}
SAVING: dict[str, dict[str, Any]] = {
    "by steps": {"callbacks": _checkpoint(every_n_train_steps=3), "max_steps": 7},
    "by metric": {
        "callbacks": lambda: [
            ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{step}-{val_loss:.5f}", save_last=True)
        ],
        "max_steps": 9,
        "val_check_interval": 2,
    },
    "by training metric": {
        "callbacks": lambda: [
            ModelCheckpoint(monitor="loss", every_n_train_steps=1, save_top_k=2, filename="{step}-{loss:.5f}")
        ],
        "max_steps": 6,
    },
    "by time": {"callbacks": _checkpoint(train_time_interval=timedelta(seconds=0)), "max_steps": 4},
    "by epoch": {
        "callbacks": _checkpoint(every_n_epochs=1, save_on_train_epoch_end=True),
        "max_steps": -1,
        "max_epochs": 2,
        "batches": 3,
    },
    "while accumulating": {
        "callbacks": _checkpoint(every_n_train_steps=2),
        "max_steps": 5,
        "accumulate_grad_batches": 2,
    },
}


IGNORE = ("`accumulate_grad_batches=",)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_counters_stop_and_log_as_in_the_ordinary_run(scenario: str) -> None:
    assert_same_runs(ignore=IGNORE, **SCENARIOS[scenario])


@pytest.mark.parametrize("scenario", SAVING)
def test_checkpoints_are_saved_as_in_the_ordinary_run(scenario: str, tmp_path: Any) -> None:
    run = assert_same_runs(ignore=IGNORE, folder=tmp_path, enable_checkpointing=True, **SAVING[scenario])
    assert len(run["files"]) >= 2
