"""Checkpoints both ways: what is written, resuming, and interchange with Lightning's own strategies."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import schedulefree
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from helpers import Lit, assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import (
    FSDPOptimInBwdStrategy,
    OptimInBwdMixin,
    OptimizerInBackward,
    SingleDeviceOptimInBwdStrategy,
    states,
)
from lightning_bwdopt.checkpoints import consolidate
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


# Two ranks ----------------------------------------------------------------------------------------------------------


def check_interchange(tmp: str, kind: str) -> None:
    def run(strategy: Strategy, module: type[Plain], **kwargs: Any) -> dict[str, Any]:
        # Other data on each rank, and in another order in each epoch.
        data = DataLoader(loader(HALF, ranks=2).dataset, batch_size=4, shuffle=True)
        return fit(strategy, seeded(module), ranks=2, use_distributed_sampler=True, data=data, **kwargs)

    whole = run(stock(kind), HandSharded, save=f"{tmp}/stock")
    assert_equal(run(ours(kind), Plain, save=f"{tmp}/ours"), whole)
    assert_equal(run(ours(kind), Mixed, save=f"{tmp}/mixed"), whole)
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    assert_equal(read(f"{tmp}/mixed", without_manual_counter=True), read(f"{tmp}/stock", without_manual_counter=True))
    for source in ("stock", "ours", "mixed"):
        path = f"{tmp}/{source}"
        assert_equal(run(stock(kind), HandSharded, resume=path), whole, f"{source} -> stock")
        assert_equal(run(ours(kind), Plain, resume=path), whole, f"{source} -> ours")
        assert_equal(run(ours(kind), Mixed, resume=path), whole, f"{source} -> mixed")
        assert_equal(run(ours(kind, granularity="parameter"), Plain, resume=path), whole, f"{source} -> by parameter")
    assert_equal(run(ours(enabled=False), Mixed, resume=f"{tmp}/mixed"), whole, "mixed -> mode off")


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
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    for source in ("stock", "ours"):
        path = f"{tmp}/{source}"
        assert_equal(fit(ours(kind), seeded(Plain, make), ranks=2, resume=path), whole, f"{source} -> ours")
        if stock_loads:
            assert_equal(fit(stock(kind), seeded(HandSharded, make), ranks=2, resume=path), whole, f"{source} -> stock")
    if kind == "full":
        assert_equal(fit(ddp(), seeded(Plain, make), ranks=2, save=f"{tmp}/ddp"), whole)
        assert_equal(fit(ours(), seeded(Plain, make), ranks=2, resume=f"{tmp}/ddp"), whole, "ddp -> ours")
        assert_equal(fit(ddp(), seeded(Plain, make), ranks=2, resume=f"{tmp}/ours"), whole, "ours -> ddp")


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
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    assert not any("_orig_mod" in name for name in read(f"{tmp}/ours")["state_dict"])
    for source in ("stock", "ours"):
        resumed = fit(ours(kind), seeded(Plain, variant=variant), ranks=2, resume=f"{tmp}/{source}")
        assert_equal(resumed, whole, f"{source} -> ours")
    # Stock cannot load its own checkpoints of the other variants, or goes on with other values or another order.
    if variant in ("frozen", "frozen group", "tied"):
        resumed = fit(stock(kind), seeded(HandSharded, variant=variant), ranks=2, resume=f"{tmp}/ours")
        assert_equal(resumed, whole, "ours -> stock")


@pytest.mark.parametrize("variant", [*LAYERS, "compiled"])
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


@pytest.mark.parametrize("variant", LAYERS)
def test_layers_on_one_device(tmp_path: Path, variant: str) -> None:
    whole = fit(single(enabled=False), seeded(Plain, variant=variant), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, variant=variant), save=tmp_path / "ours"), whole)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "stock"))
    for source in ("stock", "ours"):
        for enabled in (True, False):
            resumed = fit(single(enabled), seeded(Plain, variant=variant), resume=tmp_path / source)
            assert_equal(resumed, whole, f"{source} -> {'ours' if enabled else 'stock'}")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
def test_compiled_layers_on_one_device(tmp_path: Path) -> None:
    """Lightning's own strategy writes `_orig_mod` here, which no model can load that is compiled otherwise."""
    whole = fit(single(enabled=False), seeded(Plain, variant="compiled"), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, variant="compiled"), save=tmp_path / "ours"), whole)
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "stock")
    assert not any("_orig_mod" in name for name in ours["state_dict"])
    theirs["state_dict"] = {states.clean_name(name): value for name, value in theirs["state_dict"].items()}
    assert_equal(ours, theirs)
    for source in ("stock", "ours"):
        resumed = fit(single(), seeded(Plain, variant="compiled"), resume=tmp_path / source)
        assert_equal(resumed, whole, f"{source} -> ours")
    plain = fit(single(enabled=False), seeded(Plain), resume=tmp_path / "ours")
    assert_equal(plain["losses"], whole["losses"], "compiled -> stock, not compiled")
    assert_equal(fit(single(), seeded(Plain), resume=tmp_path / "stock"), plain, "compiled -> ours, not compiled")


def ddp() -> Strategy:
    return DDPStrategy(process_group_backend="gloo")


def check_two_ranks_from_one(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for source in ("stock", "ours"):
        assert_equal(fit(ours(), seeded(Plain), ranks=2, resume=f"{tmp}/{source}"), whole, source)
    assert_equal(fit(ddp(), seeded(Plain), ranks=2, save=f"{tmp}/ddp"), whole)
    assert_equal(fit(ours(), seeded(Mixed), ranks=2, resume=f"{tmp}/ddp"), whole, "ddp")
    fit(ours(), seeded(Plain), ranks=2, save=f"{tmp}/full")
    fit(ours("sharded"), seeded(Plain), ranks=2, save=f"{tmp}/sharded")
    assert_equal(fit(ddp(), seeded(Plain), ranks=2, resume=f"{tmp}/full"), whole, "full -> ddp")


def check_one_rank(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for kind in ("full", "sharded"):
        assert_equal(fit(ours(), seeded(Plain), resume=f"{tmp}/{kind}"), whole, kind)
        fit(ours(kind), seeded(Plain), save=f"{tmp}/one_{kind}")


def check_two_ranks_again(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for kind in ("full", "sharded"):
        assert_equal(fit(ours(), seeded(Plain), ranks=2, resume=f"{tmp}/one_{kind}"), whole, kind)


def check_three_ranks(tmp: str) -> None:
    expected = None
    for kind in ("full", "sharded"):
        hand = ModelParallelStrategy(3, 1, save_distributed_checkpoint=kind == "sharded")
        stock_run = fit(hand, seeded(HandSharded), ranks=3, resume=f"{tmp}/{kind}")
        expected = expected or stock_run
        assert_equal(stock_run, expected)
        assert_equal(fit(ours(), seeded(Plain), ranks=3, resume=f"{tmp}/{kind}"), expected, kind)


def test_across_strategies_and_world_sizes(tmp_path: Path) -> None:
    whole = fit(single(enabled=False), seeded(Plain), save=tmp_path / "stock")
    fit(single(), seeded(Mixed), save=tmp_path / "ours")
    torch.save(whole, tmp_path / "whole")
    run_distributed(check_two_ranks_from_one, str(tmp_path))
    assert_equal(fit(single(enabled=False), seeded(Plain), resume=tmp_path / "full"), whole, "two ranks -> stock")
    for kind in ("full", "sharded"):
        assert_equal(fit(single(), seeded(Plain), resume=tmp_path / kind), whole, f"{kind} -> one device")
    run_distributed(check_one_rank, str(tmp_path), world_size=1)
    run_distributed(check_two_ranks_again, str(tmp_path))
    run_distributed(check_three_ranks, str(tmp_path), world_size=3)


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
    states.parameter_names(module)  # puts the shards in place, after the evaluation at the end
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
