"""Saving changes nothing; callbacks, hooks, bare loops and new layers save and load as in an ordinary run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from checkpoint_runs import HALF, WHOLE, Mixed, Plain, fit, ours, read, sgd_with_momentum, single
from helpers import assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import OptimizerInBackward, consolidate, sharding

# What saving must not do, and what Lightning's callbacks do with checkpoints -----------------------------------------


class SaveEverywhere(Callback):
    """Saves before the first step, after some, and when the parameters are gathered for evaluation."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.path}_start")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step in (1, 3):
            trainer.save_checkpoint(f"{self.path}_step")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.path}_validation")


def validated(strategy: Strategy, variant: str, save: str | None, ranks: int) -> dict[str, Any]:
    module = seeded(Plain, variant=variant)
    callbacks: Any = [SaveEverywhere(save)] if save else []
    run = trainer(strategy=strategy, devices=ranks, max_steps=WHOLE, val_check_interval=2, callbacks=callbacks)
    run.fit(module, loader(HALF, ranks=ranks), loader(1, ranks=ranks))
    sharding.reshard(module)  # after the evaluation at the end
    return observables(module, run)


def check_saving_changes_nothing(tmp: str) -> None:
    for variant in ("late", "unfrozen"):
        without = validated(ours(enabled=False), variant, None, 2)
        for kind in ("full", "sharded"):
            assert_equal(validated(ours(kind), variant, f"{tmp}/{variant}_{kind}", 2), without, f"{variant}, {kind}")
    start = torch.load(f"{tmp}/late_full_start", weights_only=True)
    assert start["optimizer_states"][0]["state"] == {}, "saving has stepped the optimizer"


def test_saving_changes_nothing(tmp_path: Path) -> None:
    run_distributed(check_saving_changes_nothing, str(tmp_path))
    for variant in ("late", "unfrozen"):
        without = validated(single(enabled=False), variant, None, 1)
        assert_equal(validated(single(), variant, str(tmp_path / f"one_{variant}"), 1), without)


class Evaluated(Plain):
    """Keeps the weights that it is tested with."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested = {name: full(param) for name, param in self.named_parameters()}


def check_callbacks(tmp: str, kind: str) -> None:
    module = seeded(Evaluated)
    keep = ModelCheckpoint(tmp, "{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=1)
    run = trainer(
        strategy=ours(kind),
        devices=2,
        max_steps=WHOLE,
        use_distributed_sampler=False,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    run.fit(module, loader(HALF))
    torch.distributed.barrier()
    assert sorted(os.listdir(tmp)) == sorted({"last.ckpt", *(Path(path).name for path in keep.best_k_models)})
    assert all(Path(path).is_dir() == (kind == "sharded") for path in keep.best_k_models)
    last = {name: full(param) for name, param in module.named_parameters()}
    assert keep.best_model_path != keep.last_model_path
    run.test(module, loader(1), ckpt_path="last", verbose=False)
    assert_equal(module.tested, last)
    best = keep.best_model_path
    run.test(module, loader(1), ckpt_path="best", verbose=False)
    whole = consolidate(best, f"{tmp}/whole{module.global_rank}.pt") if kind == "sharded" else best
    assert_equal(module.tested, torch.load(whole, weights_only=True)["state_dict"])


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_best_and_last(tmp_path: Path, kind: str) -> None:
    run_distributed(check_callbacks, str(tmp_path), kind)


def check_overwriting(tmp: str) -> None:
    path = Path(f"{tmp}/last.ckpt")
    for kind in ("full", "sharded", "sharded", "full", "full"):
        module = seeded(Plain)
        fit(ours(kind), module, ranks=2, save=path)
        assert path.is_dir() == (kind == "sharded")
        assert os.listdir(tmp) == ["last.ckpt"]
        torch.distributed.barrier()
    with pytest.raises(IsADirectoryError, match="`.*` is a folder with `kept.txt` in it"):
        fit(ours("sharded"), seeded(Plain), ranks=2, save=folder_of_the_user(tmp))
    assert os.listdir(f"{tmp}/user") == ["kept.txt"]


def folder_of_the_user(tmp: str) -> Path:
    folder = Path(f"{tmp}/user")
    folder.mkdir(exist_ok=True)
    (folder / "kept.txt").touch()
    return folder


def test_overwriting(tmp_path: Path) -> None:
    run_distributed(check_overwriting, str(tmp_path))


# Hooks, bare loops and new heads ------------------------------------------------------------------------------------


class Overriding(Mixed):
    """Hooks of the user, with and without calling the mixin's."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"] = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        self.weights_seen = "state_dict" in checkpoint


def check_hooks(tmp: str, strategy: Callable[[], Strategy], ranks: int) -> None:
    whole = fit(strategy(), seeded(Overriding), ranks=ranks, save=f"{tmp}/mine")
    second = seeded(Overriding)
    assert_equal(fit(strategy(), second, ranks=ranks, resume=f"{tmp}/mine"), whole)
    assert second.mine == HALF

    by_hand: dict[str, Any] = {}
    Mixed.on_save_checkpoint(second, by_hand)
    optimizer = second.trainer.optimizers[0]
    assert_equal(by_hand, {"optimizer_states": [second.trainer.strategy.optimizer_state(optimizer)]})
    if ranks == 1:
        by_hand = copy.deepcopy(by_hand)
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"] * 0
        Mixed.on_load_checkpoint(second, by_hand)
        assert_equal(observables(second, second.trainer)["state"], whole["state"])


def test_hooks_of_the_mixin(tmp_path: Path) -> None:
    check_hooks(str(tmp_path), single, 1)
    run_distributed(check_hooks_on_two_ranks, str(tmp_path))


def check_hooks_on_two_ranks(tmp: str) -> None:
    for kind in ("full", "sharded"):
        check_hooks(f"{tmp}/{kind}", partial(ours, kind), 2)


def test_core_in_a_bare_loop(tmp_path: Path) -> None:
    whole = fit(single(enabled=False), seeded(Plain), save=tmp_path / "stock")
    module = seeded(Plain)
    batches = list(loader(HALF))

    def bare(steps: range, checkpoint: dict[str, Any] | None) -> tuple[Any, Any]:
        config = module.configure_optimizers()
        optimizer, scheduler = config["optimizer"], config["lr_scheduler"]["scheduler"]
        with OptimizerInBackward(optimizer) as core:
            if checkpoint is not None:
                module.load_state_dict(checkpoint["state_dict"])
                core.load_state_dict(checkpoint["optimizer_states"][0])
                scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
            for step in steps:
                torch.manual_seed(step)
                x, y = batches[step % HALF]
                nn.functional.mse_loss(module.net(x), y).backward()
                scheduler.step()
            return core.state_dict(), scheduler.state_dict()

    optimizer_state, scheduler_state = bare(range(HALF), None)
    stock_file = read(tmp_path / "stock")
    assert_equal(optimizer_state, stock_file["optimizer_states"][0])
    torch.save(
        {
            **stock_file,
            "state_dict": module.state_dict(),
            "optimizer_states": [optimizer_state],
            "lr_schedulers": [scheduler_state],
        },
        tmp_path / "bare",
    )
    assert_equal(fit(single(), seeded(Plain), resume=tmp_path / "bare"), whole, "bare -> Lightning")
    fit(single(), seeded(Plain), save=tmp_path / "ours")
    module = seeded(Plain)
    resumed, _ = bare(range(HALF, WHOLE), read(tmp_path / "ours"))
    assert_equal(dict(module.named_parameters()), {k: nn.Parameter(v) for k, v in whole["weights"].items()})
    names = dict(enumerate(n for n, p in module.named_parameters() if p.ndim > 1))
    for number, name in names.items():
        assert_equal(resumed["state"][number], dict(whole["state"][0])[name])


class NewHead(Plain):
    """Has a layer that the checkpoint lacks."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd_with_momentum)
        self.strict_loading = False
        self.new_head = nn.Linear(6, 6)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.trainer.global_step == HALF:
            self.loaded = observables(self, self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.new_head(batch[0]), batch[1]), batch_idx)


def check_new_head(tmp: str, strategy: Callable[[], Strategy], ranks: int) -> None:
    old = seeded(Plain, sgd_with_momentum)
    fit(strategy(), old, ranks=ranks, save=f"{tmp}/old")
    module = seeded(NewHead)
    fresh = {f"new_head.{name}": full(param) for name, param in module.new_head.named_parameters()}
    after = fit(strategy(), module, ranks=ranks, resume=f"{tmp}/old")
    assert_equal(dict(module.loaded["state"][0]), old.state_saved)
    assert_equal({name: module.loaded["weights"][name] for name in fresh}, fresh)
    assert list(dict(after["state"][0])) == [*old.state_saved, *fresh]


def check_new_head_on_two_ranks(tmp: str) -> None:
    for kind in ("full", "sharded"):
        check_new_head(f"{tmp}/{kind}", partial(ours, kind), 2)


def test_new_head_without_strict_loading(tmp_path: Path) -> None:
    check_new_head(str(tmp_path), single, 1)
    run_distributed(check_new_head_on_two_ranks, str(tmp_path))
