"""The observables of runs on two ranks, with FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from helpers import Lit, assert_equal, loader, run_distributed, seeded, trainer
from lightning_bwdopt import OptimInBwdMixin
from observing import assert_same_runs, moved, observe, strategy_of, weights_of
from test_callbacks import Backbone, Unfreezes, _backbone_finetuning
from test_manual import HELD, ClosureGan, Gan, Manual, ReturnsLoss, StepsBoth, UntoggledGan


class CallsItself(Lit):
    """Calls `self(...)`, the sharded root, inside a step that runs through the root's forward already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).mean(), sync_dist=True)


def _checkpoints() -> list[Any]:
    return [ModelCheckpoint(monitor="val_loss", every_n_train_steps=3, save_top_k=-1, filename="{step}")]


IGNORE = ("`accumulate_grad_batches=",)


def _observables(folder: str) -> list[str]:
    """Counting, stopping, saving, schedulers, accumulation, freezing; both loops against the mode switched off."""
    runs: dict[str, dict[str, Any]] = {
        "steps": {"max_steps": 7, "val_check_interval": 3, "batches": 6},
        "accumulation": {"max_steps": -1, "max_epochs": 2, "batches": 5, "accumulate_grad_batches": 2},
        "clipping by value": {
            "max_steps": 4,
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
            "options": {"gradient_clipping": "exact"},
        },
        "bf16-mixed": {"max_steps": 4, "precision": "bf16-mixed"},
        "bf16-true": {"max_steps": 4, "precision": "bf16-true"},
        "calls itself": {"module": CallsItself, "max_steps": 3, "batches": 3},
        "finetuning": {
            "module": Backbone,
            "callbacks": _backbone_finetuning,
            "max_steps": -1,
            "max_epochs": 3,
            "batches": 3,
        },
        "freezing": {"callbacks": lambda: [Unfreezes()], "max_steps": 5},
    }
    for settings in runs.values():
        run = assert_same_runs(ranks=2, ignore=IGNORE, **settings)
        assert run["global_step"] > 2
    return list(runs)


def test_runs_on_two_ranks_equal_the_ordinary_ones(tmp_path: Path) -> None:
    assert len(run_distributed(_observables, str(tmp_path))[1]) == 8


class HandSharded(LightningModule):
    """Mixed into a user-manual module: what stock FSDP2 needs."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for child in self.children():
            for block in getattr(child, "blocks", ()):
                fully_shard(block, mesh=mesh)
            fully_shard(child, mesh=mesh, reshard_after_forward=True)


def _stock(module: type[LightningModule], **kwargs: Any) -> dict[str, Any]:
    model = seeded(type(module.__name__, (HandSharded, module), {}))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(devices=2, strategy=strategy, **kwargs)
    run.fit(model, loader(6, ranks=2), loader(2, ranks=2))
    return {
        "losses": model.losses,
        "weights": weights_of(model),
        "global_step": run.global_step,
    }


def _manual_modules() -> list[str]:
    """User-manual modules against stock hand-sharding: with this package's mode off both could be wrong alike."""
    names = []
    for module in (Manual, Gan, UntoggledGan, ClosureGan, StepsBoth):
        settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 1}
        stock = _stock(module, **settings)
        assert moved(stock["weights"], module), module
        for loop in ("ordinary", "automatic"):
            run = observe(loop, module, ranks=2, batches=6, **settings)
            for key in stock:
                assert_equal(run[key], stock[key], f"{module.__name__} {loop} {key}")
        names.append(module.__name__)
    both = observe("ordinary", StepsBoth, ranks=2, max_steps=4)
    mixin = observe("manual", ReturnsLoss, ranks=2, max_steps=4)
    for key in ("losses", "weights", "state", "global_step", "schedulers"):
        assert_equal(mixin[key], both[key], f"returned loss {key}")
    return names


def test_user_manual_modules_on_two_ranks_equal_stock_hand_sharding() -> None:
    assert HELD
    assert len(run_distributed(_manual_modules)[0]) == 5


class NoneOnOneRank(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 else loss


class Starts(Callback):
    """Keeps the weights that each fit starts with; taken after its optimizer has been made."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, run: Trainer, module: LightningModule) -> None:
        self.weights.append(weights_of(module))


def _life() -> list[str]:
    """Validation before, a second fit, and what is refused."""
    done = []
    for loop in ("automatic", "manual"):
        results = []
        for which in ("ordinary", loop):
            model = seeded(type("Lit", (OptimInBwdMixin, Lit), {}))
            starts = Starts()
            limits: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
            run = trainer(devices=2, strategy=strategy_of(which, 2), callbacks=[starts], **limits)
            run.validate(model, loader(2, ranks=2), verbose=False)
            run.fit(model, loader(4, ranks=2), loader(2, ranks=2))  # evaluations leave the root gathered
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            run.fit_loop.max_epochs = 2
            run.fit(model, loader(4, ranks=2), loader(2, ranks=2))
            first, second, last = (*starts.weights, weights_of(model))
            for name, weight in second.items():
                assert not torch.equal(first[name], weight)
                assert not torch.equal(last[name], weight)
            results.append((second, last, model.losses, run.global_step))
        assert_equal(results[1], results[0])
        assert results[0][-1] == 8
        done.append(loop)
    return done


def test_second_fits_on_two_ranks() -> None:
    run_distributed(_life)


SCRIPT = """
    import os, signal, sys
    sys.path[:0] = [{root!r}, {tests!r}]
    from datetime import timedelta
    import torch
    from helpers import Lit, loader, seeded, trainer
    from test_two_ranks import NoneOnOneRank
    from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimInBwdMixin

    class Raises(OptimInBwdMixin, Lit):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.global_rank == 1 and batch_idx == 2:
                {trouble}
            return loss

    module = NoneOnOneRank if {none} else Raises
    strategy = FSDPOptimInBwdStrategy(timeout=timedelta(seconds=12))
    try:
        trainer(devices=2, strategy=strategy).fit(seeded(module), loader(ranks=2), loader(2, ranks=2))
    except BaseException as error:
        print(type(error).__name__, str(error)[:300])
        sys.stdout.flush()
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        # Lightning's own handler tells the other ranks with a collective, for which they come too late.
        ("os.kill(os.getpid(), signal.SIGTERM)", "Received SIGTERM"),
        (None, "RuntimeError Skipping the `training_step` by returning None"),
    ],
    ids=["SIGTERM", "None"],
)
def test_trouble_on_one_rank_ends_both(trouble: str | None, expected: str) -> None:
    tests = Path(__file__).parent
    code = textwrap.dedent(SCRIPT).format(
        root=str(tests.parent), tests=str(tests), trouble=trouble or "pass", none=trouble is None
    )
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(2):
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "trouble"}
        environment = {**os.environ, **shared, **own, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", code]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    outputs = [process.communicate(timeout=90)[0] for process in processes]  # Lightning's own limit is 30 minutes
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert expected in outputs[1]
