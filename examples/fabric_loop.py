"""The optimizer in backward with Lightning Fabric and FSDP2: ``torchrun --nproc-per-node 2 -m examples.fabric_loop``.

``fully_shard`` shards the bare model, so Fabric's own strategy has nothing to wrap.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_bwdopt import OptimizerInBackward


def shard(model: nn.Module, device_mesh: Any) -> nn.Module:
    """Each block by itself, then what remains: how FSDP2 wants it, and the units that step."""
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=device_mesh["data_parallel"])
    fully_shard(model, mesh=device_mesh["data_parallel"])
    return model


def main(
    steps: int = 5,
    *,
    in_backward: bool = True,
    clip: tuple[str, float] | None = ("norm", 1.0),
    accelerator: str = "auto",
    devices: int = 2,
    start: int = 0,
    load: Path | None = None,
    save: Path | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Trains a small model with clipping and two micro-batches; ``in_backward=False`` is the ordinary loop.

    It may start at a later step, from a checkpoint folder that either of the two has saved.
    """
    # Left to itself this strategy takes all the devices of a machine for tensor parallelism.
    strategy = ModelParallelStrategy(shard, data_parallel_size=devices, tensor_parallel_size=1)
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared: Any = fabric.setup_optimizers(optimizer)
    core = OptimizerInBackward(optimizer, units=[block.parameters() for block in model.module], clip=clip)
    if in_backward:
        core.attach()
    checkpoint = {"model": model, "optimizer": prepared}
    if load:
        fabric.load(load, checkpoint)
    losses = []
    for number in range(2 * start, 2 * steps):
        ends_step = number % 2 == 1
        noise = torch.Generator().manual_seed(number * fabric.world_size + fabric.global_rank)
        batch = torch.randn(8, 16, generator=noise).to(fabric.device)
        loss = model(batch).square().mean() / 2
        with nullcontext() if ends_step else core.accumulate():
            core.backward(loss, partial(fabric.backward, loss))
        if ends_step:
            if clip and not in_backward:
                nn.utils.clip_grad_norm_(model.parameters(), clip[1])
            prepared.step()
            prepared.zero_grad()
        losses.append(loss.item())
    if save:
        fabric.save(save, checkpoint)
    core.remove()
    return model.module, optimizer, losses


if __name__ == "__main__":
    print(*main()[2], sep="\n")
