"""Times `Trainer.save_checkpoint` under FSDP2: Lightning's own strategy against this package's.

    python -m examples.benchmark_saves --rounds 7 --json saves.json

SmolLM2-135M's shape, fp32, AdamW in its second step, on two gloo ranks: a model for each strategy, in the same
processes. A round saves each once to a new path, in an order that rotates, with nothing left to be written to the disk
before it; Lightning's runs twice, and the spread of the second against the first is the noise below which a ratio says
nothing. Figures are medians with their quartiles; ratios are to the first of the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmark import launch, summary
from examples.benchmark_models import SmolLM, many_small
from lightning_bwdopt import FSDPOptimInBwdStrategy
from lightning_bwdopt.sharding import find_blocks

STOCK = "ModelParallelStrategy"
WAYS = {STOCK: STOCK, f"{STOCK} again": STOCK, "FSDPOptimInBwdStrategy": "FSDPOptimInBwdStrategy"}
KINDS = ("full", "sharded")


class Lit(LightningModule):
    """A model that trains with AdamW; ``toy`` for a quick look."""

    def __init__(self, toy: bool, shards_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = many_small(2, 2, 8) if toy else SmolLM()
        self.toy = toy
        self.shards_itself = shards_itself

    def configure_model(self) -> None:
        if not self.shards_itself or isinstance(self.net, FSDPModule):
            return
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in find_blocks(self.net):
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(torch.randn(2, 8) if self.toy else batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def strategy(name: str, kind: str, ranks: int) -> Strategy:
    if name == STOCK:
        return ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=kind == "sharded")
    return FSDPOptimInBwdStrategy(state_dict_type=kind)  # type: ignore[arg-type]


def trained(name: str, kind: str, toy: bool) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(name, kind, dist.get_world_size()),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(toy, shards_itself=name == STOCK), DataLoader(TensorDataset(torch.randint(512, (16, 8)))))
    return trainer


def seconds(trainer: Trainer, path: Path) -> float:
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    trainer.save_checkpoint(path)
    spent = time.perf_counter() - start
    dist.barrier()
    return spent


def measure(kind: str, rounds: int, toy: bool, folder: str, device: torch.device) -> dict[str, Any]:
    """Rank 0's seconds of each save, and the size of one."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0"}
    os.environ.update(here, TORCHELASTIC_RUN_ID="benchmark")  # Lightning takes the processes for those of `torchrun`
    trainers = {name: trained(name, kind, toy) for name in dict.fromkeys(WAYS.values())}
    times: dict[str, Any] = {way: [] for way in WAYS}
    mib = 0.0
    order = list(WAYS)
    for number in range(-1, rounds):  # the first is not counted
        for way in order[number % 3 :] + order[: number % 3]:
            path = Path(folder, f"{kind}.ckpt")
            spent = seconds(trainers[WAYS[way]], path)
            if number >= 0:
                times[way].append(spent)
            if rank == "0":
                mib = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])) / 2**20
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            dist.barrier()
    return {"kind": kind, "ranks": dist.get_world_size(), "mib": round(mib), "seconds": times}


def measure_quietly(*args: Any) -> dict[str, Any]:
    """:func:`measure` in a process of its own."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return measure(*args)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m examples.benchmark_saves", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    parser.add_argument("--folder", help="where to save; the system's folder for temporary files")
    parser.add_argument("--json", help="a file for all the figures")
    options = parser.parse_args(arguments)
    report = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result = launch(options.ranks, "cpu", measure_quietly, kind, options.rounds, options.toy, folder)
        times = result.pop("seconds")
        result["ways"] = {
            way: {"s": summary(spent), "ratio": summary([a / b for a, b in zip(spent, times[STOCK], strict=True)])}
            for way, spent in times.items()
        }
        report.append(result)
        print(f"{kind}, {result['ranks']} ranks, {result['mib']} MiB\n\n| | seconds | x first |\n|---|---|---|")
        for way, row in result["ways"].items():
            cells = ["{median:.2f} ({low:.2f}-{high:.2f})".format(**row[key]) for key in ("s", "ratio")]
            print(f"| {way} | {' | '.join(cells)} |", flush=True)
        print()
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2))
    return report


if __name__ == "__main__":
    main()
