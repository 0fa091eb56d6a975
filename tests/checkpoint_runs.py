"""Short runs that save in the middle or resume from there, under every strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lion_pytorch
import schedulefree
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from helpers import Lit, loader, observables, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimInBwdMixin, SingleDeviceOptimInBwdStrategy
from lightning_bwdopt.folders import Folder

HALF, WHOLE = 4, 8  # steps; an epoch has HALF of them
LAYERS = ["frozen", "unfrozen", "frozen group", "unused", "late", "tied"]
MANUAL_COUNTER = "epoch_loop.manual_optimization.optim_step_progress"


class Plain(Lit):
    """Draws the same dropout in a step whether or not the run was resumed before it."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, variant: str = "") -> None:
        super().__init__(optimizer=optimizer)
        self.variant = variant
        self.steps_seen: list[int] = []
        self.spare = nn.Linear(6, 6) if variant in ("unused", "late") else None
        if variant == "tied":
            self.net.blocks[2].inner.weight = self.net.blocks[0].inner.weight
        if variant in ("frozen", "unfrozen"):
            self.net.stem.requires_grad_(False)
            self.net.blocks[1].requires_grad_(False)
        if variant == "frozen group":
            for param in self.parameters():
                param.requires_grad_(param.ndim > 1)
        if variant == "compiled":
            self.net.blocks[1] = torch.compile(self.net.blocks[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.variant == "late" and self.trainer.global_step in (1, 6):
            assert self.spare is not None
            batch = (self.spare(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.steps_seen.append(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.steps_seen.append(step)
        torch.manual_seed(step)
        if self.variant == "unfrozen" and step >= 2:
            self.net.blocks[1].requires_grad_(True)
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, "train", lambda: None)()  # schedule-free

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is torch.optim.AdamW:
            return super().configure_optimizers()
        return self.make_optimizer(self.parameters())


class HandSharded(Plain):
    """What a user of Lightning's own FSDP2 strategy writes."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for block in [self.net.blocks[1]] if self.variant == "tied" else self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
            if self.spare is not None:
                fully_shard(self.spare, mesh=mesh)


class Mixed(OptimInBwdMixin, Plain):
    """The manual-optimization path."""


class SaveAt(Callback):
    """Saves at the end of a step."""

    def __init__(self, path: Any, step: int = HALF) -> None:
        self.path = path
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            pl_module.state_saved = dict(observables(pl_module, trainer)["state"][0])


def fit(
    strategy: Strategy, module: Any, *, ranks: int = 1, save: Any = None, resume: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Trains WHOLE steps, saving after HALF; what can be seen, with losses and rates of the second half."""
    callbacks = [*kwargs.pop("callbacks", []), *([SaveAt(save)] if save else [])]
    # Every rank sees the same data: the mean of equal gradients is each of them, to the bit, on one rank and on two.
    kwargs = {"strategy": strategy, "devices": ranks, "use_distributed_sampler": False, **kwargs}
    data = kwargs.pop("data", None) or loader(HALF)
    run = trainer(max_steps=WHOLE, callbacks=callbacks, **kwargs)
    # Of a compiled layer the wrapper is what matters here.
    with torch.compiler.set_stance("force_eager") if module.variant == "compiled" else nullcontext():
        run.fit(module, data, ckpt_path=resume)
    seen = observables(module, run)
    if resume:
        assert module.steps_seen == [HALF, *range(HALF, WHOLE)], "`global_step`, also before the first batch"
    return {**seen, "losses": seen["losses"][-HALF:], "rates": seen["rates"][-HALF:]}


def read(path: Any, *, without_manual_counter: bool = False) -> dict[str, Any]:
    """A file, or what is in a folder; only what `weights_only=True` reads."""
    if os.path.isdir(path):
        checkpoint = Folder(Path(path), alone=True).read_whole(weights_only=True)
    else:
        checkpoint = torch.load(path, weights_only=True)
    if without_manual_counter:
        del checkpoint["loops"]["fit_loop"][MANUAL_COUNTER]
    return checkpoint


def stock(kind: str = "full") -> Strategy:
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=kind == "sharded"
    )


def ours(kind: str = "full", **kwargs: Any) -> Strategy:
    return FSDPOptimInBwdStrategy(state_dict_type=kind, **kwargs)  # type: ignore[arg-type]


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def sgd_with_momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def lion(params: Any) -> torch.optim.Optimizer:
    return lion_pytorch.Lion(params, lr=1e-3)


def schedule_free(params: Any) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(params, lr=1e-2, warmup_steps=3)


def single(enabled: bool = True, **kwargs: Any) -> Strategy:
    return SingleDeviceOptimInBwdStrategy(enabled=enabled, **kwargs) if enabled else SingleDeviceStrategy("cpu")


def ddp() -> Strategy:
    return DDPStrategy(process_group_backend="gloo")
