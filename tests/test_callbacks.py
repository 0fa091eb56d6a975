from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    LearningRateFinder,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from helpers import Lit, assert_equal, loader, seeded, trainer
from lightning_bwdopt.callbacks import OptimInBwdMonitor
from observing import LOOPS, assert_same_runs, observe, strategy_of, with_mixin
from test_manual import UntoggledGan

EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "batches": 3}


class NoSchedule(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Backbone(NoSchedule):
    """What `BackboneFinetuning` freezes and unfreezes, with an optimizer of the head alone."""

    @property
    def backbone(self) -> torch.nn.Module:
        return self.net.blocks


def _backbone_finetuning() -> list[Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)]


def test_backbone_finetuning_equals_the_ordinary_run() -> None:
    run = assert_same_runs(Backbone, callbacks=_backbone_finetuning, **EPOCHS)
    assert len(run["groups"][0]) == 2
    start = dict(seeded(Backbone).named_parameters())
    assert all(not torch.equal(weight, start[name]) for name, weight in run["weights"].items())


class Unfreezes(Callback):
    """Freezes a block at the start, unfreezes it after two steps, and freezes another."""

    def on_fit_start(self, run: Trainer, module: Any) -> None:
        module.net.blocks[0].requires_grad_(False)

    def on_train_batch_end(self, run: Trainer, module: Any, *args: Any) -> None:
        if run.global_step == 2:
            module.net.blocks[0].requires_grad_(True)
            module.net.blocks[1].requires_grad_(False)


def test_freezing_and_unfreezing_equals_the_ordinary_run() -> None:
    assert_same_runs(callbacks=lambda: [Unfreezes()], max_steps=5)


class HeadOnly(NoSchedule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.1, momentum=0.9)


class AddsGroup(Callback):
    def on_train_batch_start(self, run: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if run.global_step == 2:
            run.optimizers[0].add_param_group({"params": list(module.net.stem.parameters()), "lr": 0.01})


def test_group_added_after_the_start_is_trained() -> None:
    run = assert_same_runs(HeadOnly, callbacks=lambda: [AddsGroup()], max_steps=5)
    assert not torch.equal(
        run["weights"]["net.stem.weight"], dict(seeded(HeadOnly).named_parameters())["net.stem.weight"]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
        lambda: WeightAveraging(avg_fn=lambda averaged, current, count: averaged + (current - averaged) / (count + 1)),
    ],
    ids=["StochasticWeightAveraging", "WeightAveraging"],
)
def test_weight_averaging_on_one_device_equals_the_ordinary_run(make: Any) -> None:
    assert_same_runs(NoSchedule, callbacks=lambda: [make()], **EPOCHS)


class Norm(NoSchedule):
    """With a batch norm, for which stochastic weight averaging runs an epoch without backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net.dropout = torch.nn.BatchNorm1d(10)


def test_stochastic_weight_averaging_updates_batch_norms_as_in_the_ordinary_run() -> None:
    callbacks = lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]  # noqa: E731
    assert_same_runs(Norm, callbacks=callbacks, ignore=("`accumulate_grad_batches=",), **EPOCHS)


class Spikes(SpikeDetection):
    """Sees a spike in the third batch, whatever its loss."""

    def _is_spike(self, loss: Tensor) -> bool:
        return self._batches_seen() == 3

    def _batches_seen(self) -> int:
        self.seen = getattr(self, "seen", 0) + 1
        return self.seen


def test_spike_detection_stops_the_same_batch(tmp_path: Path) -> None:
    for loop in ("ordinary", *LOOPS):
        module = seeded(with_mixin(NoSchedule) if loop == "manual" else NoSchedule)
        path = tmp_path / f"{loop}.json"
        spikes = Spikes(warmup=0, exclude_batches_path=path)
        run = trainer(strategy=strategy_of(loop), callbacks=[spikes])
        with pytest.raises(TrainingSpikeException):
            run.fit(module, loader(), loader(2))
        assert run.global_step == 3
        assert not run.strategy.step_half_applied
    texts = [(tmp_path / f"{loop}.json").read_text() for loop in ("ordinary", *LOOPS)]
    assert texts[0] == texts[1] == texts[2]


def test_device_stats_are_logged_at_the_same_steps() -> None:
    pytest.importorskip("psutil")
    runs = [
        observe(loop, max_steps=3, callbacks=lambda: [DeviceStatsMonitor(cpu_stats=True)])
        for loop in ("ordinary", *LOOPS)
    ]
    logged = [[(step, sorted(metrics)) for step, metrics in run["logged"]] for run in runs]
    assert logged[0] == logged[1] == logged[2]
    assert any("on_train_batch_end" in key for _, keys in logged[0] for key in keys)


class Actions(SimpleProfiler):
    """Keeps the order of actions instead of their times."""

    actions: list[str]

    def start(self, action_name: str) -> None:
        if not hasattr(self, "actions"):
            self.actions = []
        self.actions.append(action_name)
        super().start(action_name)


@pytest.mark.parametrize("loop", LOOPS)
def test_profilers_see_the_same_actions(loop: str) -> None:
    seen = []
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Lit) if which == "manual" else Lit)
        profiler = Actions()
        strategy = strategy_of(which)
        trainer(max_steps=3, strategy=strategy, profiler=profiler).fit(module, loader(), loader(2))
        seen.append([action.replace(type(strategy).__name__, "Strategy") for action in profiler.actions])
    own = "run_training_batch"
    assert own in seen[0]
    assert seen[1] == seen[0]


class Shows(Lit):
    """With metrics for the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_shown", self.net(batch[0]).mean(), prog_bar=True, sync_dist=True)


class Shown(Callback):
    """Keeps what a bar says after each batch: where it is, of how many, and the metrics beside it."""

    def __init__(self, bar: TQDMProgressBar | RichProgressBar) -> None:
        self.bar = bar
        self.said: list[Any] = []

    def _look(self, run: Trainer, module: Any, *args: Any) -> None:
        bar = self.bar
        counts: list[Any] = []
        if isinstance(bar, RichProgressBar):
            if bar.progress is not None:  # there is none on other ranks than the first
                counts = [(task.description, task.completed, task.total) for task in bar.progress.tasks]
        elif run.is_global_zero:
            counts = [bar.train_progress_bar.n, bar.train_progress_bar.total, bar.train_progress_bar.postfix]
        self.said.append((counts, bar.get_metrics(run, module)))

    on_train_batch_end = on_validation_batch_end = on_validation_end = on_train_epoch_end = _look


BARS = (TQDMProgressBar, RichProgressBar)


def what_bars_show(bar: type[TQDMProgressBar | RichProgressBar], loop: str, ranks: int = 1) -> list[Any]:
    """What the bar has said in two epochs on this rank."""
    shown = Shown(bar())
    module = seeded(with_mixin(Shows) if loop == "manual" else Shows)
    limits: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "enable_progress_bar": True, "devices": ranks}
    run = trainer(strategy=strategy_of(loop, ranks), callbacks=[shown.bar, shown], **limits)
    run.fit(module, loader(3, ranks=ranks), loader(2, ranks=ranks))
    return shown.said


@pytest.mark.parametrize("bar", BARS)
def test_progress_bars_show_the_same(bar: Any) -> None:
    pytest.importorskip("rich")
    shown = {loop: what_bars_show(bar, loop) for loop in ("ordinary", *LOOPS)}
    assert_equal(shown["automatic"], shown["ordinary"])
    assert_equal(shown["manual"], shown["ordinary"])
    counts, metrics = shown["ordinary"][-1]
    assert counts
    assert {"shown_step", "shown_epoch", "val_shown"} <= metrics.keys()


# Tuner ------------------------------------------------------------------------------------------------------------


class Tuned(Lit):
    """With the attributes that `Tuner` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.batch_size = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(12, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(2)


@pytest.mark.parametrize("loop", LOOPS)
def test_lr_find_and_the_fit_after_it_equal_the_ordinary_run(loop: str, tmp_path: Any) -> None:
    found = []
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Tuned) if which == "manual" else Tuned)
        run = trainer(max_steps=4, strategy=strategy_of(which), default_root_dir=tmp_path)
        result = Tuner(run).lr_find(module, min_lr=1e-5, max_lr=1e-1, num_training=12, update_attr=True)
        assert result is not None
        module.losses.clear()
        run.fit(module)
        found.append((result.results, module.lr, module.losses, dict(module.named_parameters()), run.global_step))
    assert len(found[0][0]["loss"]) >= 12
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_scale_batch_size_equals_the_ordinary_run(loop: str, tmp_path: Any) -> None:
    found = []
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Tuned) if which == "manual" else Tuned)
        run = trainer(max_steps=4, strategy=strategy_of(which), default_root_dir=tmp_path)
        size = Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2)
        module.losses.clear()
        run.fit(module)
        found.append((size, module.losses, dict(module.named_parameters()), run.global_step))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_learning_rate_finder_equals_the_ordinary_run(loop: str, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "callbacks": lambda: [LearningRateFinder(num_training_steps=8)]}
    assert_same_runs(Tuned, loops=(loop,), folder=tmp_path, **settings)


# The monitor ------------------------------------------------------------------------------------------------------


def _logged(run: dict[str, Any], name: str) -> list[tuple[int, float]]:
    return [(step, metrics[name]) for step, metrics in run["logged"] if name in metrics]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_monitor_logs_the_norm_and_the_count_of_an_ordinary_run(loop: str, accumulate: int) -> None:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "callbacks": lambda: [OptimInBwdMonitor(log_grad_norm=True), Unfreezes()],
        "accumulate_grad_batches": accumulate,
    }
    ordinary, run = observe("ordinary", **settings), observe(loop, **settings)
    assert _logged(run, "stepped_parameters") == _logged(ordinary, "stepped_parameters")
    assert len(_logged(run, "stepped_parameters")) == 4
    norms, expected = _logged(run, "grad_norm"), _logged(ordinary, "grad_norm")
    assert [step for step, _ in norms] == [step for step, _ in expected]
    assert len(norms) == 4
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected), rtol=1e-6, atol=0)  # another order of sums


class UntoggledScheduledGan(UntoggledGan):
    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()


def test_monitor_logs_held_gradients_as_those_of_an_ordinary_run() -> None:
    ordinary, run = (
        observe(loop, UntoggledScheduledGan, callbacks=lambda: [OptimInBwdMonitor(log_grad_norm=True)], max_steps=6)
        for loop in ("ordinary", "automatic")
    )
    assert_equal(run["logged"], ordinary["logged"])
    assert len(_logged(run, "grad_norm")) == 4  # every second batch makes two steps
    assert [rate for _, rate in _logged(run, "lr-AdamW")] == [0.01, 0.005, 0.0025, 0.00125]


def test_monitor_without_a_logger_is_refused() -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="`OptimInBwdMonitor` has nowhere to log to"):
        observe("automatic", callbacks=lambda: [OptimInBwdMonitor()], logger=False)
