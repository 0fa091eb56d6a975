"""What test_launch.py starts on each rank: a run that checkpoints every two steps, and may lose a rank."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from helpers import Lit, Net, loader, observables, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy


class Dies(Callback):
    """Ends the process of one rank without a word, before a step; only the first time that the job runs."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, run: Any, *args: Any) -> None:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and run.global_rank == self.rank and run.global_step == self.step:
            os._exit(3)


class Hangs(Callback):
    """Lets the others wait for one rank, before a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, run: Any, *args: Any) -> None:
        if run.global_rank == self.rank and run.global_step == self.step:
            time.sleep(3600)


class Calm(Lit):
    """Without dropout: Lightning does not keep the state of the random numbers in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.0)


def job(
    folder: Path, nodes: int = 1, events: tuple[Callback, ...] = (), timeout: int = 60, **options: Any
) -> dict[str, Any]:
    module = seeded(Calm)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    run = trainer(
        strategy=FSDPOptimInBwdStrategy(state_dict_type="sharded", timeout=timedelta(seconds=timeout)),
        devices=2 // nodes,
        num_nodes=nodes,
        max_steps=6,
        enable_checkpointing=True,
        callbacks=[keep, *events],
        default_root_dir=folder,
    )
    # Step 4 ends an epoch, so that the resumed run reads what the other one does.
    run.fit(module, loader(batches=4, ranks=2), **options)
    return observables(module, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--dies", type=int)
    parser.add_argument("--then-hangs", type=int)
    parser.add_argument("--timeout", type=int, default=60)
    arguments = parser.parse_args()
    newest = arguments.folder / "last.ckpt"
    seen = job(
        arguments.folder,
        arguments.nodes,
        () if arguments.dies is None else (Dies(arguments.dies, step=5),),
        arguments.timeout,
        ckpt_path=str(newest) if newest.exists() else None,
    )
    torch.save(seen, arguments.folder / f"rank{torch.distributed.get_rank()}.pt")
    if arguments.then_hangs is not None:
        job(arguments.folder / "hangs", arguments.nodes, (Hangs(arguments.then_hangs, step=1),))
