"""What test_launch.py starts on each rank: a run that checkpoints every two steps, and may lose a rank, or two runs."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from helpers import Lit, Net, loader, observables, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy

FAILURES = {"dies": partial(os._exit, 3), "hangs": partial(time.sleep, 3600)}


class Fails(Callback):
    """Rank 1 ends without a word, or lets the others wait, before a step."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_train_batch_start(self, run: Any, *args: Any) -> None:
        if run.global_rank == 1 and run.global_step == self.step:
            FAILURES[self.how]()


class Calm(Lit):
    """Without dropout: Lightning does not keep the state of the random numbers in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.0)


def job(
    folder: Path, nodes: int = 1, timeout: int = 60, failure: Fails | None = None, **options: Any
) -> dict[str, Any]:
    module = seeded(Calm)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    run = trainer(
        strategy=FSDPOptimInBwdStrategy(state_dict_type="sharded", timeout=timedelta(seconds=timeout)),
        devices=2 // nodes,
        num_nodes=nodes,
        max_steps=6,
        enable_checkpointing=True,
        callbacks=[keep, failure] if failure else [keep],
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
    parser.add_argument("--timeout", type=int, default=60)
    parser.add_argument("--together", type=int, default=0, help="processes that wait for each other at start")
    parser.add_argument("--at-first", choices=FAILURES, help="what rank 1 does in the first attempt")
    parser.add_argument("--in-the-end", choices=FAILURES, help="what rank 1 does in a second run")
    options = parser.parse_args()
    if options.together:  # a short time-out is for what comes later: on a busy machine one starts long before another
        (options.folder / f"{os.getpid()}.started").touch()
        while len(list(options.folder.glob("*.started"))) < options.together:
            time.sleep(0.05)
    at_first = options.at_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    failure = Fails(options.at_first, step=5) if at_first else None
    newest = options.folder / "last.ckpt"
    resume = {"ckpt_path": str(newest)} if newest.exists() else {}
    seen = job(options.folder, options.nodes, options.timeout, failure, **resume)
    torch.save(seen, options.folder / f"rank{torch.distributed.get_rank()}.pt")
    if options.in_the_end:
        job(options.folder / "second", options.nodes, options.timeout, Fails(options.in_the_end, step=1))
