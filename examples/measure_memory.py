"""The estimate against reality: what two real ranks hold in a steady step, and what was simulated.

``python -m examples.measure_memory`` trains a model of 67 M parameters on gloo ranks, ordinarily and in backward, and
prints the peak of each rank's resident set above what it was before the model was built, beside the estimate. Linux
only.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_bwdopt import FSDPOptimInBwdStrategy
from lightning_bwdopt.memory import MIB
from lightning_bwdopt.process_memory import PROMPT_ALLOCATOR, memory_reader, peak, restart_peak
from lightning_bwdopt.simulation import simulate

CPU = torch.device("cpu")


class Block(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of ``width`` numbers."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Blocks(LightningModule):
    """A stack of them, with AdamW."""

    def __init__(self, depth: int = 8, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Rows(LightningDataModule):
    """Random rows."""

    def __init__(self, batch_size: int = 128, width: int = 1024) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.width = width

    def train_dataloader(self) -> DataLoader:
        """Four batches for each of two ranks."""
        return DataLoader(TensorDataset(torch.randn(8 * self.batch_size, self.width)), batch_size=self.batch_size)


class SteadyPeak(Callback):
    """The most that the process holds in the steps after the first, which makes the optimizer's state."""

    bytes = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        restart_peak(CPU)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step > 1:
            self.bytes = max(self.bytes, peak(CPU))


def fit(module: LightningModule, data: LightningDataModule, enabled: bool, ranks: int, **options: Any) -> None:
    """Three steps."""
    Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=FSDPOptimInBwdStrategy(enabled=enabled),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module, datamodule=data)


def measure(rank: int, ranks: int, port: int, enabled: bool, folder: str) -> None:
    """One rank: leaves what its resident set grows by in a file."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0", TORCHELASTIC_RUN_ID="measure")
    torch.set_num_threads(1)
    fit(Blocks(2, 32), Rows(4, 32), enabled, ranks)  # what libraries make at first use is not the model's
    gc.collect()
    start = memory_reader(CPU)()
    steady = SteadyPeak()
    fit(Blocks(), Rows(), enabled, ranks, callbacks=[steady])
    Path(folder, f"rank{rank}").write_text(str(steady.bytes - start))


def estimated(enabled: bool, ranks: int, folder: str) -> int:
    """The simulated peak, in bytes."""
    config = Path(folder, "config.yaml")
    strategy = {"class_path": "lightning_bwdopt.FSDPOptimInBwdStrategy"}
    sections = {
        "trainer": {"accelerator": "cpu", "devices": ranks, "strategy": strategy},
        "model": {"class_path": "examples.measure_memory.Blocks"},
        "data": {"class_path": "examples.measure_memory.Rows"},
    }
    config.write_text(yaml.safe_dump(sections))
    return simulate(["--config", str(config)], enabled=enabled).most


def main() -> None:
    """Measures both modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    os.environ.update({**PROMPT_ALLOCATOR, **os.environ})  # for the ranks: glibc reads it when a process starts
    print("| | estimate, MiB | measured by rank, MiB | measured / estimate |\n|---|---|---|---|", flush=True)
    for name, enabled in (("ordinary", False), ("in backward", True)):
        with tempfile.TemporaryDirectory() as folder:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(measure, (ranks, port, enabled, folder), nprocs=ranks)
            grown = [int(Path(folder, f"rank{rank}").read_text()) for rank in range(ranks)]
            most = estimated(enabled, ranks, folder)
        measured = ", ".join(f"{size / MIB:.1f}" for size in grown)
        ratios = ", ".join(f"{size / most:.3f}" for size in grown)
        print(f"| {name} | {most / MIB:.1f} | {measured} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
