"""Checkpoints that cannot be loaded: an error that names the file and the reason, and nothing is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from checkpoint_runs import WHOLE, Plain, fit, lion, ours, read, sgd, sgd_with_momentum, single
from helpers import assert_equal, full, loader, run_distributed, seeded, trainer
from lightning_bwdopt import CheckpointError

Change = Callable[[dict[str, Any]], None]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


class Wider(Plain):
    """Another architecture."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net.stem = nn.Linear(6, 12)
        self.net.more = nn.Linear(2, 2)


class HeadOnly(Plain):
    """Optimizes less."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.head.parameters(), lr=1e-3)


class TwoOptimizers(Plain):
    """Optimizes with two."""

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.net.head, self.net.stem)]


def refuses(strategy: Strategy, module: Any, path: Path, reason: str, ranks: int) -> None:
    """`fit` names the file and gives the reason; weights and optimizers are as they were built."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = trainer(strategy=strategy, devices=ranks, max_steps=WHOLE)
    with pytest.raises(CheckpointError, match=f"(?s)`{path}` .*{reason}"):
        run.fit(module, loader(1), ckpt_path=path)
    assert_equal({name: full(value) for name, value in module.state_dict().items()}, before)
    for optimizer in run.optimizers:
        assert not optimizer.state
        assert (
            optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["initial_lr" if module.warm_up > 6 else "lr"]
        )
    assert not module.losses, "it has trained"


def changed(path: Path, change: Change) -> None:
    checkpoint = read(path)
    change(checkpoint)
    torch.save(checkpoint, path.with_name(change.__name__))


def without_parameter(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["optimizer_states"][0]
    state["param_groups"][0]["params"].remove(4)
    del state["state"][4]


def with_other_shape(checkpoint: dict[str, Any]) -> None:
    entry = checkpoint["optimizer_states"][0]["state"][0]
    entry["exp_avg"] = entry["exp_avg"][:, :2]


def with_stray_state(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["optimizer_states"][0]["state"]
    state[99] = state[0]


def without_second_moment(checkpoint: dict[str, Any]) -> None:
    for entry in checkpoint["optimizer_states"][0]["state"].values():
        del entry["exp_avg_sq"]


def of_other_torch(checkpoint: dict[str, Any]) -> None:
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        del group["decoupled_weight_decay"], group["fused"]
        group["of_a_later_version"] = False


def of_no_optimizer(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = [{"state": {0: None}, "param_groups": []}]


def weights_alone(checkpoint: dict[str, Any]) -> None:
    weights = checkpoint.pop("state_dict")
    checkpoint.clear()
    checkpoint.update(weights)


def check_files(tmp: Path, strategy: Callable[[], Strategy], ranks: int) -> None:
    """With the files `adamw`, `lion`, `momentum` and `weights` of one-group optimizers on one device."""

    def check(module: Any, path: Path, reason: str) -> None:
        refuses(strategy(), module, path, reason, ranks)

    adamw_file = tmp / "adamw"
    check(seeded(Plain, adamw), tmp / "weights", r"holds weights only \(`save_weights_only=True`\)")
    check(seeded(Plain, adamw), tmp / "weights_alone", "has no `state_dict`")
    check(seeded(Plain, adamw), tmp / "cut", "cannot be read as a checkpoint: it is cut short")
    check(seeded(Wider, adamw), adamw_file, "net.more.weight.*net.stem.weight.*Nothing was changed")
    check(
        seeded(Plain, sgd), adamw_file, "optimizer 0, `SGD`: it is of another optimizer: its groups lack .*`momentum`"
    )
    check(seeded(Plain, lion), adamw_file, "`Lion`: it is of another optimizer: its states have `exp_avg_sq`, `step`")
    check(seeded(Plain, adamw), tmp / "lion", "its groups lack `eps` of `AdamW`")
    check(seeded(Plain), adamw_file, "it has 1 parameter groups, and the `AdamW` here 2")
    check(seeded(HeadOnly), adamw_file, "group 0 has 22 parameters in it and 2 here; only in it: .*net.stem.weight")
    check(seeded(TwoOptimizers), adamw_file, "it has the states of 1 optimizers, and there are 2")
    check(seeded(Plain, adamw), tmp / "without_parameter", "not in it: `net.blocks.0.outer.weight`")
    check(seeded(Plain, adamw), tmp / "with_other_shape", r"exp_avg of net.stem.weight: \[10, 2\] instead of \[10, 6\]")
    check(seeded(Plain, adamw), tmp / "with_stray_state", "it has the state of `99`, which none of its groups names")
    check(seeded(Plain, adamw), tmp / "without_second_moment", "lacks the state `exp_avg_sq` of `net.stem.weight`")
    check(seeded(Plain, adamw), tmp / "of_no_optimizer", "it is no optimizer state")
    with pytest.raises(FileNotFoundError, match="nothing.ckpt"):
        trainer(strategy=strategy(), devices=ranks).fit(seeded(Plain), loader(1), ckpt_path=tmp / "nothing.ckpt")
    fit(strategy(), seeded(Plain, adamw), ranks=ranks, resume=tmp / "of_other_torch")


def write_files(tmp: Path) -> None:
    fit(single(), seeded(Plain, adamw), save=tmp / "adamw")
    fit(single(), seeded(Plain, lion), save=tmp / "lion")
    changes = [without_parameter, with_other_shape, with_stray_state, without_second_moment]
    changes += [of_other_torch, of_no_optimizer, weights_alone]
    for change in changes:
        changed(tmp / "adamw", change)
    (tmp / "cut").write_bytes((tmp / "adamw").read_bytes()[:-1000])
    run = trainer(strategy=single(), max_steps=1)
    run.fit(seeded(Plain), loader(1))
    run.save_checkpoint(tmp / "weights", weights_only=True)


def test_files_on_one_device(tmp_path: Path) -> None:
    write_files(tmp_path)
    check_files(tmp_path, single, 1)


def check_files_on_two_ranks(tmp: str) -> None:
    check_files(Path(tmp), ours, 2)


def test_files_on_two_ranks(tmp_path: Path) -> None:
    write_files(tmp_path)
    run_distributed(check_files_on_two_ranks, str(tmp_path))


def check_folders(tmp: str) -> None:
    good = Path(tmp) / "good"
    fit(ours("sharded"), seeded(Plain, adamw), ranks=2, save=good)
    rank = torch.distributed.get_rank()

    def check(module: Any, reason: str, spoil: Callable[[Path], Any] | None = None) -> None:
        path = good
        if spoil is not None:
            path = Path(tmp) / "spoilt"
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(good, path)
                spoil(path)
        torch.distributed.barrier()
        refuses(ours(), module, path, reason, 2)
        torch.distributed.barrier()

    for name in ("__0_0.distcp", "__1_0.distcp"):
        check(seeded(Plain, adamw), f"its shard `{name}` is missing", lambda path, name=name: (path / name).unlink())
    shard = "__1_0.distcp"
    cut = f"its shard `{shard}` has 1000 bytes instead of at least"
    check(seeded(Plain, adamw), cut, lambda path: (path / shard).write_bytes((path / shard).read_bytes()[:1000]))
    check(seeded(Plain, adamw), "its save did not complete", lambda path: (path / "meta.pt").unlink())
    check(seeded(Plain, adamw), "its `.metadata` cannot be read", lambda path: (path / ".metadata").unlink())
    check(seeded(Wider, adamw), "lacks the model's `net.more.weight`.*net.stem.weight: .10, 6. instead of .12, 6.")
    check(seeded(Plain, sgd_with_momentum), "`SGD`: it is of another optimizer: its groups lack .*`momentum`")
    check(seeded(Plain, lion), "`Lion`: it is of another optimizer: its states have `exp_avg_sq`, `step`")
    check(seeded(HeadOnly), "group 0 has 22 parameters in it and 2 here; only in it: `net.stem.weight`")

    # On one rank alone: the others must not go on.
    path = good if rank == 0 else Path(tmp) / "elsewhere"
    run = trainer(strategy=ours("sharded"), devices=2, max_steps=WHOLE)
    run.fit(seeded(Plain, adamw), loader(1), ckpt_path=path)  # rank 0's name counts
    weights = Path(tmp) / "weights"
    run.save_checkpoint(weights, weights_only=True)
    refuses(ours(), seeded(Plain, adamw), weights, "holds weights only", 2)


def test_folders(tmp_path: Path) -> None:
    run_distributed(check_folders, str(tmp_path))
