from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import lr_scheduler as schedulers

from helpers import Lit, seeded
from lightning_bwdopt.callbacks import OptimInBwdMonitor
from observing import assert_same_runs


def _groups(module: Any) -> list[dict[str, Any]]:
    parameters = dict(module.named_parameters())
    head = [p for name, p in parameters.items() if "head" in name]
    body = [p for name, p in parameters.items() if "head" not in name]
    return [{"params": body}, {"params": head, "lr": 0.03, "weight_decay": 0.2}]


def _adamw(module: Any, lr: Any = 1e-2) -> Any:
    return torch.optim.AdamW(_groups(module), lr=lr)


def _sgd(module: Any) -> Any:
    return torch.optim.SGD(_groups(module), lr=0.05, momentum=0.8)


def _warm_up(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: step / 4)


def _sequential(optimizer: Any) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3),
        schedulers.CosineAnnealingLR(optimizer, T_max=4),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def _one_cycle(module: Any) -> Any:
    optimizer = _adamw(module)
    return [optimizer], [{"scheduler": schedulers.OneCycleLR(optimizer, 0.05, total_steps=12), "interval": "step"}]


def _one_cycle_of_momentum(module: Any) -> Any:
    optimizer = _sgd(module)
    scheduler = schedulers.OneCycleLR(
        optimizer, [0.05, 0.02], total_steps=module.trainer.estimated_stepping_batches + 1, cycle_momentum=True
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _plateau(monitor: str, interval: str = "epoch", frequency: int = 1) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = _sgd(module)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
        config = {"scheduler": scheduler, "monitor": monitor, "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    return configure


def _by_step(
    make: Callable[[Any], Any], optimizer: Callable[[Any], Any] = _adamw, **config: Any
) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        built = optimizer(module)
        return {"optimizer": built, "lr_scheduler": {"scheduler": make(built), "interval": "step", **config}}

    return configure


def _two_schedulers(module: Any) -> Any:
    optimizer = _adamw(module)
    by_step = {"scheduler": _warm_up(optimizer), "interval": "step", "frequency": 2, "name": "warm up"}
    return [optimizer], [by_step, schedulers.StepLR(optimizer, 1, gamma=0.5)]


FORMS: dict[str, Callable[[Any], Any]] = {
    "an optimizer": _adamw,
    "a list of optimizers": lambda module: [_adamw(module)],
    "a tuple of lists": lambda module: ([o := _adamw(module)], [schedulers.ExponentialLR(o, 0.5)]),
    "a dict": lambda module: {"optimizer": _adamw(module)},
    "a dict with a scheduler": lambda module: {"optimizer": (o := _adamw(module)), "lr_scheduler": _warm_up(o)},
    "a tuple of dicts": lambda module: ({"optimizer": (o := _adamw(module)), "lr_scheduler": _warm_up(o)},),
    "two schedulers": _two_schedulers,
    "warm-up by step": _by_step(_warm_up),
    "every second step": _by_step(_warm_up, frequency=2),
    "sequential": _by_step(_sequential, _sgd),
    "chained": _by_step(lambda o: schedulers.ChainedScheduler([_warm_up(o), schedulers.ExponentialLR(o, 0.9)])),
    "one cycle": _one_cycle,
    "one cycle with momentum": _one_cycle_of_momentum,
    "a rate in a tensor": _by_step(_warm_up, lambda module: _adamw(module, torch.tensor(0.01))),
    "plateau on validation": _plateau("val_loss"),
    "plateau on training": _plateau("loss", "step", 2),
    "plateau of a missing metric": _by_step(
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0), monitor="loss", strict=False, interval="epoch"
    ),
}


def _module(configure: Callable[[Any], Any], **members: Any) -> type[Lit]:
    return type("Lit", (Lit,), {"configure_optimizers": configure, **members})


def _monitors() -> list[Any]:
    return [
        LearningRateMonitor(log_momentum=True, log_weight_decay=True),
        OptimInBwdMonitor(log_momentum=True, log_weight_decay=True),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers_schedules_as_in_the_ordinary_run(form: str) -> None:
    run = assert_same_runs(_module(FORMS[form]), max_steps=-1, max_epochs=3, batches=4, callbacks=_monitors)
    assert run["global_step"] == 12
    assert len({step for step, metrics in run["logged"] if "stepped_parameters" in metrics}) == 12


def test_scheduler_steps_once_per_window_of_accumulation() -> None:
    assert_same_runs(
        _module(FORMS["warm-up by step"]),
        max_steps=-1,
        max_epochs=2,
        batches=5,
        accumulate_grad_batches=2,
        callbacks=_monitors,
        ignore=("`accumulate_grad_batches=",),
    )


def test_custom_lr_scheduler_step_is_called() -> None:
    calls = []

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        calls.append((self.global_step, metric is None))
        scheduler.step(epoch=self.global_step * 2)

    module = _module(_by_step(_warm_up), lr_scheduler_step=lr_scheduler_step)
    assert_same_runs(module, max_steps=4, callbacks=_monitors, ignore=("The epoch parameter",))
    assert calls[:4] == calls[4:8] == calls[8:]


def test_first_step_of_warm_up_has_rate_zero_in_the_hook() -> None:
    module = _module(_by_step(_warm_up, lambda module: torch.optim.SGD(module.parameters(), lr=0.1)))
    run = assert_same_runs(module, max_steps=1)
    start = dict(seeded(module).named_parameters())
    assert all(torch.equal(weight, start[name]) for name, weight in run["weights"].items())
