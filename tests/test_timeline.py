"""The memory of one step over its time: what is recorded, in which runs, and that nothing else changes."""

from __future__ import annotations

import csv
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from helpers import Lit, assert_equal, loader, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, plots, process_memory, timeline
from lightning_bwdopt.callbacks import MemoryTimeline
from observing import observe, strategy_of, with_mixin

COLUMNS = ["ms", "phase", "event", "unit", "memory_bytes", "gradient_bytes"]


def record(
    loop: str, folder: Path, ranks: int = 1, strategy: Any = None, draw: bool = False, **options: Any
) -> list[timeline.Sample]:
    """A run of a few steps, of which one is recorded."""
    module = seeded(with_mixin(Lit) if loop == "manual" else Lit)
    callback = MemoryTimeline(step=2, dirpath=folder, draw=draw)
    run = trainer(
        strategy=strategy or strategy_of(loop, ranks), devices=ranks, max_steps=4, callbacks=[callback], **options
    )
    run.fit(module, loader(ranks=ranks))
    assert callback.file is not None
    return timeline.read_csv(callback.file)


def total(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def most(samples: list[timeline.Sample]) -> int:
    return max(sample.gradient_bytes for sample in samples)


def kinds(samples: list[timeline.Sample]) -> list[str]:
    """The parts of the step, where the same follows the same once."""
    names = [span.name for span in timeline.phases(samples)]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def check_ordinary(samples: list[timeline.Sample], share: Any, optimizer: str = "AdamW") -> None:
    assert kinds(samples) == ["forward", "backward", "optimizer step"]
    assert most(samples) == share
    (step,) = timeline.steps(samples)
    backward, after = timeline.phases(samples)[-2:]
    assert step.name == optimizer
    assert after.start_ms <= step.start_ms < step.end_ms <= after.end_ms
    assert backward.end_ms <= step.start_ms


def check_in_backward(samples: list[timeline.Sample], share: float, units: set[str]) -> None:
    assert kinds(samples) == ["forward", "backward"]
    backward = timeline.phases(samples)[-1]
    steps = list(timeline.steps(samples))
    assert {step.name for step in steps} == units
    assert len(steps) == len(units)
    assert all(backward.start_ms <= step.start_ms < step.end_ms <= backward.end_ms for step in steps)
    assert 0 < most(samples) < share / 2
    # Each unit's gradients go with its step.
    ends = [sample.gradient_bytes for sample in samples if sample.event == "step ends"]
    assert ends[-1] == 0


@pytest.mark.parametrize("loop", ["automatic", "manual"])
def test_one_device(tmp_path: Path, loop: str) -> None:
    share = total(Lit())
    ordinary = record("ordinary", tmp_path, draw=True)
    (tmp_path / "memory_step2_ordinary_rank0.png").unlink()  # drawn again, on the axes of both, by the next run
    in_backward = record(loop, tmp_path, draw=True)
    check_ordinary(ordinary, share)
    units = {"net.blocks.0", "net.blocks.1", "net.blocks.2", "net.stem", "net.head"}
    check_in_backward(in_backward, share, units)
    arrived = [sample.unit for sample in ordinary if sample.event == "gradient"]
    assert sorted(arrived) == sorted(name for name, _ in Lit().named_parameters())
    for mode in ("ordinary", "in_backward"):
        with (tmp_path / f"memory_step2_{mode}_rank0.csv").open() as file:
            assert next(csv.reader(file)) == COLUMNS
        assert (tmp_path / f"memory_step2_{mode}_rank0.png").read_bytes().startswith(b"\x89PNG")
    assert all(100 < sample.memory_bytes / 2**20 < 100_000 for sample in ordinary)


def test_pictures_have_the_same_axes(tmp_path: Path) -> None:
    runs = {"a": record("ordinary", tmp_path), "b": record("automatic", tmp_path)}
    figures = plots.draw_timelines(runs, "resident set")
    axes = [[(a.get_xlim(), a.get_ylim(), a.get_xlabel(), a.get_ylabel()) for a in figure.axes] for figure in figures]
    assert len(axes[0]) == 2
    assert axes[0] == axes[1]
    (_, right), (bottom, top) = axes[0][0][:2]
    assert bottom < min(sample.memory_bytes / 2**20 for samples in runs.values() for sample in samples)
    assert right == max(sample.ms for samples in runs.values() for sample in samples)
    assert top > max(sample.memory_bytes / 2**20 for samples in runs.values() for sample in samples)


def _on_two_ranks(folder: Path) -> None:
    share = total(Lit()) / 2
    units = {"net.blocks.0", "net.blocks.1", "net.blocks.2", "net"}
    check_ordinary(record("ordinary", folder / "plain", 2, draw=True), pytest.approx(share, rel=0.3))  # uneven
    for loop in ("automatic", "manual"):
        check_in_backward(record(loop, folder / loop, 2), share * 1.3, units)
    check_in_backward(
        record("", folder / "parameter", 2, strategy=FSDPOptimInBwdStrategy(granularity="parameter")),
        share * 1.3,
        {name for name, _ in Lit().named_parameters()},
    )
    # Micro-batches hold the gradients of all units until the last one's backward.
    accumulated = record("automatic", folder / "accumulated", 2, accumulate_grad_batches=2)
    assert [span.name for span in timeline.phases(accumulated)] == ["forward", "backward"] * 2
    assert most(accumulated) > 0.6 * share
    assert {step.name for step in timeline.steps(accumulated)} == units
    last = timeline.phases(accumulated)[-1]
    assert all(step.start_ms >= last.start_ms for step in timeline.steps(accumulated))
    # Clipping's first pass drops every gradient without a step.
    strategy = FSDPOptimInBwdStrategy(gradient_clipping="exact")
    clipped = record("", folder / "clipped", 2, strategy=strategy, gradient_clip_val=0.1)
    check_in_backward(clipped, share * 1.3, units)
    check_ordinary(record("", folder / "stock", 2, strategy="ddp"), total(Lit()))


def test_two_ranks(tmp_path: Path) -> None:
    run_distributed(_on_two_ranks, tmp_path)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        f"memory_step2_ordinary_rank{rank}.{kind}" for rank in (0, 1) for kind in ("csv", "png")
    ]


class Rivals(Lit):
    """Two optimizers, stepped by the module itself."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.blocks.parameters()), torch.optim.Adam(self.net.head.parameters())


class UntoggledRivals(Rivals):
    toggles = False


@pytest.mark.filterwarnings("ignore:`manual_backward` was called with 2 optimizers and none toggled")
@pytest.mark.parametrize("module", [Rivals, UntoggledRivals])
@pytest.mark.parametrize("enabled", [False, True])
def test_several_optimizers_stepped_by_the_module(tmp_path: Path, enabled: bool, module: type[Rivals]) -> None:
    callback = MemoryTimeline(step=3, dirpath=tmp_path, draw=False)  # a batch counts two steps
    run = trainer(strategy=strategy_of("automatic" if enabled else "ordinary"), max_steps=8, callbacks=[callback])
    run.fit(seeded(module), loader())
    assert callback.file is not None
    samples = timeline.read_csv(callback.file)
    if enabled and not module.toggles:  # the gradients wait for `optimizer.step()`
        assert kinds(samples) == ["forward", "backward", "optimizer step"] * 2
        first, second = [span for span in timeline.phases(samples) if span.name == "optimizer step"]
        steps = list(timeline.steps(samples))
        assert [step.name for step in steps] == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]
        assert all(first.start_ms <= step.start_ms < step.end_ms <= first.end_ms for step in steps[:3])
        assert second.start_ms <= steps[3].start_ms < steps[3].end_ms <= second.end_ms
    elif enabled:
        assert kinds(samples) == ["forward", "backward"] * 2
        # of the first loss and the second one
        names = [step.name for step in timeline.steps(samples)]
        assert len(names) == 4
        assert names[3] == "net.head"
    else:
        assert kinds(samples) == ["forward", "backward", "optimizer step"] * 2
        assert [step.name for step in timeline.steps(samples)] == ["SGD", "Adam"]


class Accumulates(Lit):
    """Steps with every second batch, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch[0]).square().mean())
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_micro_batches_of_user_code_are_recorded(tmp_path: Path) -> None:
    callback = MemoryTimeline(step=2, dirpath=tmp_path, draw=False)
    trainer(max_steps=4, callbacks=[callback]).fit(seeded(Accumulates), loader())
    assert callback.file is not None
    samples = timeline.read_csv(callback.file)
    assert kinds(samples) == ["forward", "backward", "forward", "backward", "optimizer step"]
    assert [step.name for step in timeline.steps(samples)] == ["AdamW"]


def test_a_resumed_run_in_which_a_batch_counts_two_steps(tmp_path: Path) -> None:
    run = trainer(max_steps=4)
    run.fit(seeded(Rivals), loader(2))
    run.save_checkpoint(tmp_path / "four.ckpt")
    callback = MemoryTimeline(step=3, dirpath=tmp_path, draw=False)  # the first batch from there on, which begins at 4
    run = trainer(max_steps=8, callbacks=[callback])
    run.fit(seeded(Rivals), loader(2), ckpt_path=tmp_path / "four.ckpt", weights_only=False)  # a warning is an error
    assert callback.file is not None


class Looks(Callback):
    """Keeps what is hooked and which threads run, at each batch's backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_before_backward(self, run: Trainer, module: Any, loss: Any) -> None:
        hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in module.parameters())
        self.seen.append((hooks, any(thread.name == "memory timeline" for thread in threading.enumerate())))


def test_other_steps_have_nothing_hooked(tmp_path: Path) -> None:
    looks = Looks()
    run = trainer(max_steps=4, callbacks=[MemoryTimeline(dirpath=tmp_path, draw=False), looks])
    run.fit(seeded(Lit), loader())
    count = len(list(Lit().parameters()))
    assert looks.seen == [(0, False), (count, True), (0, False), (0, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["memory_step1_ordinary_rank0.csv"]


@pytest.mark.parametrize("loop", ["ordinary", "automatic", "manual"])
def test_training_is_that_without_it(tmp_path: Path, loop: str) -> None:
    plain, watched = (
        observe(loop, max_steps=4, callbacks=callbacks)
        for callbacks in (list, lambda: [MemoryTimeline(dirpath=tmp_path, draw=False)])
    )
    assert_equal(watched, plain)


def test_default_folder_is_the_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = MemoryTimeline(draw=False)
    trainer(max_steps=2, logger=CSVLogger(tmp_path, name="run"), callbacks=[callback]).fit(seeded(Lit), loader())
    assert callback.file == tmp_path / "run" / "version_0" / "memory_step1_ordinary_rank0.csv"
    assert callback.file.exists()


# What is refused or said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (-1, ValueError, "`step=-1` is before the first step"),
        (1.5, TypeError, "`step=1.5` is not a whole number"),
        (True, TypeError, "`step=True` is not a whole number"),
    ],
)
def test_steps_that_are_none(step: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MemoryTimeline(step=step)


def test_a_step_that_does_not_come_is_said(tmp_path: Path) -> None:
    callback = MemoryTimeline(step=2, dirpath=tmp_path)
    run = trainer(max_steps=2, callbacks=[callback])
    with pytest.warns(UserWarning, match=r"`MemoryTimeline\(step=2\)` has recorded nothing: .* after 2 steps"):
        run.fit(seeded(Lit), loader(2))
    run.save_checkpoint(tmp_path / "two.ckpt")
    run = trainer(max_steps=4, callbacks=[MemoryTimeline(step=1, dirpath=tmp_path)])
    with pytest.warns(UserWarning, match=r"`MemoryTimeline\(step=1\)` records nothing: this run goes on from step 2"):
        run.fit(seeded(Lit), loader(2), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert [path.name for path in tmp_path.iterdir()] == ["two.ckpt"]


class Fails(Lit):
    def on_after_backward(self) -> None:
        raise ArithmeticError


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    module = seeded(Fails)
    with pytest.raises(ArithmeticError):
        trainer(callbacks=[MemoryTimeline(step=0, dirpath=tmp_path)]).fit(module, loader())
    assert not any(thread.name == "memory timeline" for thread in threading.enumerate())
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_without_matplotlib_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"`MemoryTimeline` draws with matplotlib, .*The figures are in `.*\.csv`"):
        assert record("ordinary", tmp_path, draw=True)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_system_without_proc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_STATUS", Path("/nowhere"))
    with pytest.raises(RuntimeError, match="Memory on `cpu` is .* read from `/proc`, and this system has no such"):
        process_memory.memory_reader(torch.device("cpu"))
