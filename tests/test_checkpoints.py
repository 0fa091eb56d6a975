"""Checkpoints both ways: what is written, resuming, and interchange with Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import schedulefree
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from helpers import Lit, assert_equal, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimInBwdMixin, SingleDeviceOptimInBwdStrategy

HALF, WHOLE = 4, 8  # steps; an epoch has HALF of them
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

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    strategy: Strategy, module: Any, *, ranks: int = 1, save: Any = None, resume: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Trains WHOLE steps, saving after HALF; what can be seen, with losses and rates of the second half."""
    callbacks = [*kwargs.pop("callbacks", []), *([SaveAt(save)] if save else [])]
    run = trainer(strategy=strategy, devices=ranks, max_steps=WHOLE, callbacks=callbacks, **kwargs)
    # Of a compiled layer the wrapper is what matters here.
    with torch.compiler.set_stance("force_eager") if module.variant == "compiled" else nullcontext():
        run.fit(module, loader(HALF, ranks=ranks), ckpt_path=resume)
    seen = observables(module, run)
    if resume:
        assert module.steps_seen == [HALF, *range(HALF, WHOLE)], "`global_step`, also before the first batch"
    return {**seen, "losses": seen["losses"][-HALF:], "rates": seen["rates"][-HALF:]}


def read(path: Any, *, without_manual_counter: bool = False) -> dict[str, Any]:
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


# Two ranks ----------------------------------------------------------------------------------------------------------


def check_interchange(tmp: str, kind: str) -> None:
    whole = fit(stock(kind), seeded(HandSharded), ranks=2, save=f"{tmp}/stock")
    assert_equal(fit(ours(kind), seeded(Plain), ranks=2, save=f"{tmp}/ours"), whole)
    assert_equal(fit(ours(kind), seeded(Mixed), ranks=2, save=f"{tmp}/mixed"), whole)
    if kind == "full":
        assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
        assert_equal(
            read(f"{tmp}/mixed", without_manual_counter=True), read(f"{tmp}/stock", without_manual_counter=True)
        )
    for source in ("stock", "ours", "mixed"):
        path = f"{tmp}/{source}"
        assert_equal(fit(stock(kind), seeded(HandSharded), ranks=2, resume=path), whole, f"{source} -> stock")
        assert_equal(fit(ours(kind), seeded(Plain), ranks=2, resume=path), whole, f"{source} -> ours")
        assert_equal(fit(ours(kind), seeded(Mixed), ranks=2, resume=path), whole, f"{source} -> mixed")
        by_parameter = ours(kind, granularity="parameter")
        assert_equal(fit(by_parameter, seeded(Plain), ranks=2, resume=path), whole, f"{source} -> by parameter")
    assert_equal(fit(ours(enabled=False), seeded(Mixed), ranks=2, resume=f"{tmp}/mixed"), whole, "mixed -> mode off")


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_two_ranks_interchange(tmp_path: Path, kind: str) -> None:
    run_distributed(check_interchange, str(tmp_path), kind)


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


def check_optimizer(tmp: str, make: Callable[..., Any], kind: str, stock_loads: bool) -> None:
    whole = fit(stock(kind), seeded(HandSharded, make), ranks=2, save=f"{tmp}/stock")
    assert_equal(fit(ours(kind), seeded(Plain, make), ranks=2, save=f"{tmp}/ours"), whole)
    if kind == "full":
        assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    for source in ("stock", "ours"):
        path = f"{tmp}/{source}"
        assert_equal(fit(ours(kind), seeded(Plain, make), ranks=2, resume=path), whole, f"{source} -> ours")
        if stock_loads:
            assert_equal(fit(stock(kind), seeded(HandSharded, make), ranks=2, resume=path), whole, f"{source} -> stock")


@pytest.mark.parametrize(
    ("make", "stock_loads"),
    [(sgd, False), (sgd_with_momentum, True), (lion, True), (schedule_free, False)],
)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_optimizers_on_two_ranks(tmp_path: Path, make: Any, stock_loads: bool, kind: str) -> None:
    run_distributed(check_optimizer, str(tmp_path), make, kind, stock_loads)


def check_variant(tmp: str, variant: str, kind: str) -> None:
    whole = fit(stock(kind), seeded(HandSharded, variant=variant), ranks=2, save=f"{tmp}/stock")
    assert_equal(fit(ours(kind), seeded(Plain, variant=variant), ranks=2, save=f"{tmp}/ours"), whole)
    if kind == "full":
        assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
        assert not any("_orig_mod" in name for name in read(f"{tmp}/ours")["state_dict"])
    for source in ("stock", "ours") if kind == "full" else ("ours",):
        resumed = fit(ours(kind), seeded(Plain, variant=variant), ranks=2, resume=f"{tmp}/{source}")
        assert_equal(resumed, whole, f"{source} -> ours")


@pytest.mark.parametrize("variant", ["frozen", "unfrozen", "frozen group", "unused", "late", "tied", "compiled"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_layers_on_two_ranks(tmp_path: Path, variant: str, kind: str) -> None:
    run_distributed(check_variant, str(tmp_path), variant, kind)


# One device, and across strategies ----------------------------------------------------------------------------------


def single(enabled: bool = True, **kwargs: Any) -> Strategy:
    return SingleDeviceOptimInBwdStrategy(enabled=enabled, **kwargs) if enabled else SingleDeviceStrategy("cpu")


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd, sgd_with_momentum, lion, schedule_free, adafactor])
def test_one_device_interchange(tmp_path: Path, make: Any) -> None:
    whole = fit(single(enabled=False), seeded(Plain, make), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, make), save=tmp_path / "ours"), whole)
    assert_equal(fit(single(), seeded(Mixed, make), save=tmp_path / "mixed"), whole)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "stock"))
    for source in ("stock", "ours", "mixed"):
        path = tmp_path / source
        assert_equal(fit(single(enabled=False), seeded(Plain, make), resume=path), whole, f"{source} -> stock")
        assert_equal(fit(single(), seeded(Plain, make), resume=path), whole, f"{source} -> ours")
        assert_equal(
            fit(single(granularity="parameter"), seeded(Mixed, make), resume=path), whole, f"{source} -> mixed"
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("variant", ["frozen", "unfrozen", "frozen group", "unused", "late", "tied", "compiled"])
def test_layers_on_one_device(tmp_path: Path, variant: str) -> None:
    whole = fit(single(enabled=False), seeded(Plain, variant=variant), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, variant=variant), save=tmp_path / "ours"), whole)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "stock"))
    for source in ("stock", "ours"):
        assert_equal(
            fit(single(), seeded(Plain, variant=variant), resume=tmp_path / source), whole, f"{source} -> ours"
        )
    assert_equal(fit(single(enabled=False), seeded(Plain, variant=variant), resume=tmp_path / "ours"), whole)
