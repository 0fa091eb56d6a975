"""Saving beside training: what is written is the step at which it was asked for, though training goes on in place."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_runs import Plain, fit, ours, read, single
from helpers import assert_equal, run_distributed, seeded
from lightning_bwdopt import CheckpointError, consolidate, storage
from lightning_bwdopt.checkpoint_files import FileCheckpointIO
from lightning_bwdopt.folders import Folder, FolderWriter


class LateFiles(FileCheckpointIO):
    """Writes when training has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.ended.wait(60)
        super().save_checkpoint(*args, **kwargs)


class End(Callback):
    def __init__(self, files: LateFiles) -> None:
        self.files = files

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self.files.ended.set()


def check_files(tmp: str, strategy: Any, ranks: int) -> None:
    whole = fit(strategy(), seeded(Plain), ranks=ranks, save=f"{tmp}/at_once")
    files = LateFiles()
    beside = {"plugins": [AsyncCheckpointIO(files)], "callbacks": [End(files)]}
    assert_equal(fit(strategy(), seeded(Plain), ranks=ranks, save=f"{tmp}/beside", **beside), whole)
    if ranks == 1 or torch.distributed.get_rank() == 0:
        assert_equal(read(f"{tmp}/beside"), read(f"{tmp}/at_once"))


def check_files_on_two_ranks(tmp: str) -> None:
    check_files(tmp, ours, 2)


def test_files(tmp_path: Path) -> None:
    check_files(str(tmp_path / "one"), single, 1)
    run_distributed(check_files_on_two_ranks, str(tmp_path))


def test_default_file_plugin_is_ours() -> None:
    strategy = single()
    strategy.checkpoint_io = AsyncCheckpointIO()
    assert isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
    assert isinstance(strategy.checkpoint_io.checkpoint_io, FileCheckpointIO)


def check_folders(tmp: str) -> None:
    whole = fit(ours("sharded"), seeded(Plain), ranks=2, save=f"{tmp}/at_once")
    strategy = ours("sharded")
    beside = {"plugins": [AsyncCheckpointIO()]}
    assert_equal(fit(strategy, seeded(Plain), ranks=2, save=f"{tmp}/beside", **beside), whole)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        files = [consolidate(f"{tmp}/{name}", f"{tmp}/{name}.pt") for name in ("at_once", "beside")]
        assert_equal(read(files[1]), read(files[0]))
    copy.deepcopy(strategy._writer)

    blocked = Path(tmp) / "blocked"
    blocked.touch()
    for how in (beside, {}):
        with pytest.raises(RuntimeError, match=r"Writing the checkpoint `.*blocked/it` failed. rank 0: \w+Error: .*it"):
            fit(ours("sharded"), seeded(Plain), ranks=2, save=blocked / "it", **how)
    # Rank 0 alone writes a file; the other must not wait for it.
    rank = torch.distributed.get_rank()
    error, match = (FileExistsError, "blocked") if rank == 0 else (CheckpointError, "Rank 0 could not: FileExistsError")
    with pytest.raises(error, match=match):
        fit(ours(), seeded(Plain), ranks=2, save=blocked / "it")


def check_snapshot(tmp: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(2.0e6), mesh, [Shard(0)], src_data_rank=None)
    plain = torch.zeros(())
    writer, path = FolderWriter(), Path(tmp) / "snapshot"
    writer.save({"state_dict": {"weight": weight, "plain": plain}}, {"counter": plain}, path, beside=True)
    weight._local_tensor.zero_()
    plain += 1
    writer.wait()
    torch.distributed.barrier()
    saved = Folder(path, alone=True).read_whole()
    assert_equal(
        saved, {"counter": torch.zeros(()), "state_dict": {"weight": torch.arange(2.0e6), "plain": torch.zeros(())}}
    )
    torch.distributed.barrier()
    assert not storage.partial_path(path).exists()
    writer.close()


def test_folders(tmp_path: Path) -> None:
    run_distributed(check_folders, str(tmp_path))


def test_snapshot_of_a_folder(tmp_path: Path) -> None:
    run_distributed(check_snapshot, str(tmp_path))
