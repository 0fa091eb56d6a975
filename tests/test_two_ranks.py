"""The observables of runs on two ranks, with FSDP2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from helpers import Lit, assert_equal, loader, run_distributed, seeded, trainer
from lightning_bwdopt import OptimInBwdMixin
from lightning_bwdopt.callbacks import OptimInBwdMonitor
from observing import LOOPS, Records, assert_same_runs, moved, observe, strategy_of, weights_of, with_mixin
from test_callbacks import (
    BARS,
    Actions,
    AddsGroup,
    Backbone,
    HeadOnly,
    NoSchedule,
    Spikes,
    Tuned,
    Unfreezes,
    _backbone_finetuning,
    what_bars_show,
)
from test_counting import SAVING
from test_hooks import Spied
from test_life_cycle import MODULES, Copying, Interrupted, Trouble
from test_manual import HELD, ClosureGan, Gan, Manual, NoOptimizer, ReturnsLoss, StepsBoth, UntoggledGan
from test_schedulers import FORMS, _by_step, _monitors, _warm_up
from test_schedulers import _module as _scheduled


class CallsItself(Lit):
    """Calls `self(...)`, the sharded root, inside a step that runs through the root's forward already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).mean(), sync_dist=True)


IGNORE = (
    "`accumulate_grad_batches=",
    "Gradient clipping (in `configure_gradient_clipping`)",
    "The epoch parameter in `scheduler.step()`",
)


def _twice_as_fast(self: LightningModule, scheduler: Any, metric: Any) -> None:
    scheduler.step(epoch=self.global_step * 2)


def _accumulating_until_it_rises() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 2}), EarlyStopping("val_loss", patience=1, mode="max")]


EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "batches": 2}
RUNS: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 7, "val_check_interval": 3, "batches": 6},
    "accumulation": {"max_steps": -1, "max_epochs": 2, "batches": 5, "accumulate_grad_batches": 2},
    "clipping by value": {
        "max_steps": 4,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
        "options": {"gradient_clipping": "exact"},
    },
    "bf16-mixed": {"max_steps": 4, "precision": "bf16-mixed"},
    "bf16-true": {"max_steps": 4, "precision": "bf16-true"},
    "calls itself": {"module": CallsItself, "max_steps": 3, "batches": 3},
    "finetuning": {"module": Backbone, "callbacks": _backbone_finetuning, **EPOCHS},
    "freezing": {"callbacks": lambda: [Unfreezes()], "max_steps": 5},
    "a group added": {"module": HeadOnly, "callbacks": lambda: [AddsGroup()], "max_steps": 4},
    "hooks": {"module": Spied, "max_steps": 3, "num_sanity_val_steps": 1},
    "fast_dev_run": {"fast_dev_run": 3},
    "overfit_batches": {**EPOCHS, "overfit_batches": 2},
    "no optimizer": {"module": NoOptimizer, **EPOCHS},
    "a scheduler step of its own": {
        "module": _scheduled(_by_step(_warm_up), lr_scheduler_step=_twice_as_fast),
        "callbacks": _monitors,
        "max_steps": 4,
    },
    "stopping early": {"callbacks": _accumulating_until_it_rises, **EPOCHS, "max_epochs": 9},
}
SCHEDULED = (
    "two schedulers",
    "sequential",
    "one cycle with momentum",
    "a rate in a tensor",
    "plateau on validation",
    "plateau on training",
)
SAVED = ("by steps", "by metric", "by time")


def _observables(folder: Path) -> list[str]:
    """Both loops against the mode switched off."""
    for settings in RUNS.values():
        run = assert_same_runs(ranks=2, ignore=IGNORE, **settings)
        assert run["global_step"] > 2 or settings.get("module") is NoOptimizer
    for form in SCHEDULED:  # the monitors log the rate that the hooks used
        run = assert_same_runs(_scheduled(FORMS[form]), ranks=2, callbacks=_monitors, **EPOCHS)
        rates = {rate for _, metrics in run["logged"] for name, rate in metrics.items() if name.endswith("/pg1")}
        assert run["global_step"] == 6
        assert len(rates) > 1, form  # of the first group
    for way in SAVED:
        (folder / way).mkdir(exist_ok=True)
        run = assert_same_runs(ranks=2, folder=folder / way, enable_checkpointing=True, **SAVING[way])
        assert len(run["files"]) >= 2
    return [*RUNS, *SCHEDULED, *SAVED]


def test_runs_on_two_ranks_equal_the_ordinary_ones(tmp_path: Path) -> None:
    assert len(run_distributed(_observables, tmp_path)[1]) == 24


def _lr_find(folder: Path) -> float:
    found = []
    for loop in ("ordinary", *LOOPS):
        module = seeded(with_mixin(Tuned) if loop == "manual" else Tuned)
        run = trainer(max_steps=3, strategy=strategy_of(loop, 2), devices=2, default_root_dir=folder)
        result = Tuner(run).lr_find(module, min_lr=1e-5, max_lr=1e-1, num_training=16, update_attr=True)
        module.losses.clear()
        run.fit(module)
        found.append((result.results, module.lr, module.losses, weights_of(module), run.global_step))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])
    return module.lr


def _copies() -> int:
    """What can be copied of the ordinary run can be copied; FSDP2 does not allow it for modules."""
    copies = {}
    for loop, module_class in MODULES.items():
        copying = Copying()
        module = seeded(module_class)
        watched: dict[str, Any] = {"callbacks": [copying, OptimInBwdMonitor()], "logger": Records()}
        run = trainer(max_steps=3, strategy=strategy_of(loop, 2), devices=2, **watched)
        run.fit(module, loader(ranks=2), loader(2, ranks=2))
        copying.copy("after", run, module)
        copies[loop] = {key for key, thing in copying.copies.items() if not isinstance(thing, type)}
    for loop in LOOPS:
        assert copies["ordinary"] <= copies[loop]
    return len(copies["ordinary"])


def _callbacks(folder: Path) -> None:
    """A spike stops the same batch; a profiler sees the same actions; the device's statistics have the same names."""
    seen = []
    for loop in ("ordinary", *LOOPS):
        module = seeded(with_mixin(NoSchedule) if loop == "manual" else NoSchedule)
        records, profiler, strategy = Records(), Actions(), strategy_of(loop, 2)
        callbacks = [Spikes(warmup=0, exclude_batches_path=folder / loop), DeviceStatsMonitor(cpu_stats=True)]
        watched: dict[str, Any] = {"callbacks": callbacks, "logger": records, "profiler": profiler}
        run = trainer(devices=2, strategy=strategy, log_every_n_steps=1, **watched)
        with pytest.raises(TrainingSpikeException):
            run.fit(module, loader(ranks=2), loader(2, ranks=2))
        assert not strategy.step_half_applied
        actions = [action.replace(type(strategy).__name__, "Strategy") for action in profiler.actions]
        seen.append((run.global_step, actions, [(step, sorted(metrics)) for step, metrics in records.metrics]))
    assert seen[0][0] == 3
    assert_equal(seen[1], seen[0])
    assert_equal(seen[2], seen[0])


def _progress_bars() -> list[Any]:
    """What they say on this rank in the ordinary run."""
    said = []
    for bar in BARS:
        shown = {loop: what_bars_show(bar, loop, ranks=2) for loop in ("ordinary", *LOOPS)}
        assert_equal(shown["automatic"], shown["ordinary"])
        assert_equal(shown["manual"], shown["ordinary"])
        said.append(shown["ordinary"])
    return said


def _half_applied(folder: Path, error: type[BaseException]) -> tuple[Any, ...]:
    """An exception, or Ctrl-C, on every rank when some blocks have been stepped; how the runs end."""
    ends = []
    on_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    for loop in ("ordinary", *LOOPS):
        module = seeded(with_mixin(Interrupted) if loop == "manual" else Interrupted)
        module.error = error
        files = folder / loop
        run = trainer(
            devices=2,
            strategy=strategy_of(loop, 2),
            callbacks=[ModelCheckpoint(files, save_on_exception=True)],
            enable_checkpointing=True,
        )
        said = pytest.warns(UserWarning, match="`ModelCheckpoint` saved no checkpoint on this exception")
        warned = loop != "ordinary" and dist.get_rank() == 0
        with said if warned else nullcontext(), pytest.raises((Trouble, SystemExit)) as end:
            run.fit(module, loader(ranks=2), loader(2, ranks=2))
        ends.append((end.type, end.value.args))
        if loop == "ordinary":
            assert len(list(files.glob("*"))) == 1
            continue
        with pytest.raises(RuntimeError, match="weights are those of no step"):
            run.save_checkpoint(files / "explicit.ckpt")
        assert not list(files.glob("*"))
    signal.signal(signal.SIGINT, on_sigint)
    assert ends[1:] == ends[:1] * 2
    return ends[0]


def test_callbacks_tuning_copying_and_exceptions_on_two_ranks(tmp_path: Path) -> None:
    assert run_distributed(_half_applied, tmp_path / "Ctrl-C", KeyboardInterrupt) == [(SystemExit, (1,))] * 2
    assert run_distributed(_half_applied, tmp_path / "exception", Trouble) == [(Trouble, ("something broke",))] * 2
    for said, others in zip(*run_distributed(_progress_bars), strict=True):
        assert said[-1][1].keys() == others[-1][1].keys() >= {"shown_step", "shown_epoch", "val_shown"}
        assert said[-1][0]
        assert not others[-1][0]  # one rank has a bar
    run_distributed(_callbacks, tmp_path)
    assert run_distributed(_lr_find, tmp_path)[0] != Tuned().lr
    assert run_distributed(_copies)[1] >= 12


class HandSharded(LightningModule):
    """Mixed into a user-manual module: what stock FSDP2 needs."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for child in self.children():
            for block in getattr(child, "blocks", ()):
                fully_shard(block, mesh=mesh)
            fully_shard(child, mesh=mesh, reshard_after_forward=True)


def _stock(module: type[LightningModule], **kwargs: Any) -> dict[str, Any]:
    model = seeded(type(module.__name__, (HandSharded, module), {}))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(devices=2, strategy=strategy, **kwargs)
    run.fit(model, loader(6, ranks=2), loader(2, ranks=2))
    return {
        "losses": model.losses,
        "weights": weights_of(model),
        "global_step": run.global_step,
    }


def _manual_modules() -> list[str]:
    """User-manual modules against stock hand-sharding: with this package's mode off both could be wrong alike."""
    names = []
    for module in (Manual, Gan, UntoggledGan, ClosureGan, StepsBoth):
        settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 1}
        stock = _stock(module, **settings)
        assert moved(stock["weights"], module), module
        for loop in ("ordinary", "automatic"):
            run = observe(loop, module, ranks=2, batches=6, **settings)
            for key in stock:
                assert_equal(run[key], stock[key], f"{module.__name__} {loop} {key}")
        names.append(module.__name__)
    both = observe("ordinary", StepsBoth, ranks=2, max_steps=4)
    mixin = observe("manual", ReturnsLoss, ranks=2, max_steps=4)
    for key in ("losses", "weights", "state", "global_step", "schedulers"):
        assert_equal(mixin[key], both[key], f"returned loss {key}")
    return names


def test_user_manual_modules_on_two_ranks_equal_stock_hand_sharding() -> None:
    assert HELD
    assert len(run_distributed(_manual_modules)[0]) == 5


class Starts(Callback):
    """Keeps the weights that each fit starts with; taken after its optimizer has been made."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, run: Trainer, module: LightningModule) -> None:
        self.weights.append(weights_of(module))


class Evaluated(Lit):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def _life() -> list[str]:
    """Validation before, a second fit, test and prediction after."""
    done = []
    for loop in ("automatic", "manual"):
        results = []
        for which in ("ordinary", loop):
            model = seeded(type("Evaluated", (OptimInBwdMixin, Evaluated), {}))
            starts = Starts()
            limits: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
            run = trainer(devices=2, strategy=strategy_of(which, 2), callbacks=[starts], **limits)
            run.validate(model, loader(2, ranks=2), verbose=False)
            run.fit(model, loader(4, ranks=2), loader(2, ranks=2))  # evaluations leave the root gathered
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            run.fit_loop.max_epochs = 2
            run.fit(model, loader(4, ranks=2), loader(2, ranks=2))
            first, second, last = (*starts.weights, weights_of(model))
            for name, weight in second.items():
                assert not torch.equal(first[name], weight)
                assert not torch.equal(last[name], weight)
            tested = run.test(model, loader(2, ranks=2), verbose=False)
            predicted = run.predict(model, loader(2, ranks=2))
            results.append((second, last, model.losses, tested, predicted, run.global_step))
        assert_equal(results[1], results[0])
        assert results[0][-1] == 8
        done.append(loop)
    return done


def test_second_fits_on_two_ranks() -> None:
    run_distributed(_life)


# What the rank in trouble says; Lightning's own limit for the other one would be 30 minutes.
TROUBLE = {
    "Ctrl-C": "SystemExit True",  # on both
    # Its handler tells the other ranks with a collective, for which they come too late.
    "SIGTERM": "Received SIGTERM",
    "ValueError": "ValueError only here",
    "None": "RuntimeError Skipping the `training_step` by returning None",
}


def test_trouble_ends_both_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trouble_job.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    statuses = json.loads(done.stdout)
    for trouble, said in TROUBLE.items():
        for loop in LOOPS:
            logs = {name: (tmp_path / name).read_text() for name in (f"{trouble} {loop} 0", f"{trouble} {loop} 1")}
            assert [statuses[name] for name in logs] == [1, 1], logs
            assert said in logs[f"{trouble} {loop} 1"]
