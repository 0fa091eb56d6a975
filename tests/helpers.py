"""Gloo workers that are started once and run many checks, and the small models that the tests share."""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TIMEOUT = 240  # seconds for one check on all ranks


def run_distributed(fn: Callable[..., Any], *args: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Calls a module-level function on every rank of a gloo group; its results by rank.

    An exception on any rank fails the caller with that rank's traceback, and so does a check that hangs.
    """
    return _workers(world_size).run(fn, *args, **kwargs)


class Workers:
    """A gloo group of spawned processes. A failure ends the group, since the other ranks may wait for ever."""

    def __init__(self, world_size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["lightning.pytorch", "torch.distributed.checkpoint"])  # imported once for all
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.alive = True

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        call = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(results) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank in results or not pipe.poll(0.02):
                    continue
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.stop()
                    raise AssertionError(f"rank {rank} failed in `{fn.__qualname__}`:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"`{fn.__qualname__}` did not end; ranks {sorted(results)} did")
        return [results[rank] for rank in range(len(self._pipes))]

    def stop(self) -> None:
        self.alive = False
        for process in self._processes:
            process.kill()


_GROUPS: dict[int, Workers] = {}


def _workers(world_size: int) -> Workers:
    group = _GROUPS.get(world_size)
    if group is None or not group.alive:
        group = _GROUPS[world_size] = Workers(world_size)
        atexit.register(group.stop)
    return group


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    # Lightning takes these for processes that `torchrun` started.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        TORCHELASTIC_RUN_ID="tests",
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    environment = dict(os.environ)
    while True:
        try:
            module, name, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            answer = (True, fn(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        os.environ.clear()
        os.environ.update(environment)  # Lightning's seed, for one, would reach the next check
        pipe.send_bytes(pickle.dumps(answer))


def assert_equal(actual: Any, expected: Any, at: str = "") -> None:
    """Equal to the bit, through nested containers, with the order of dict keys."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), f"{at}: keys {list(actual)} instead of {list(expected)}"
        for key in expected:
            assert_equal(actual[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{at}: {len(actual)} entries instead of {len(expected)}"
        for index, (mine, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(mine, other, f"{at}[{index}]")
    elif isinstance(expected, Tensor):
        assert type(actual) is type(expected), f"{at}: {type(actual)} instead of {type(expected)}"
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{at}: {text}")
    else:
        assert (type(actual), actual) == (type(expected), expected), f"{at}: {actual!r} instead of {expected!r}"


class Block(nn.Module):
    """Two layers with a residual; uneven on two and three ranks."""

    def __init__(self, width: int = 10, hidden: int = 7) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(torch.tanh(self.inner(x))))


class Net(nn.Module):
    """Repeated blocks between a stem and a head, with dropout."""

    def __init__(self, depth: int = 3, dropout: float = 0.1, hidden: int = 7) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


class Lit(LightningModule):
    """A plain module: AdamW in two groups, linear warm-up by step. Keeps losses and rates as it sees them."""

    def __init__(self, steps_of_warm_up: int = 6, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = Net()
        self.warm_up = steps_of_warm_up
        self.make_optimizer = optimizer
        self.losses: list[Tensor] = []
        self.rates: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.detach().clone())
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        plain = [p for p in self.parameters() if p.ndim == 1]
        optimizer = self.make_optimizer(
            [{"params": decay, "lr": 1e-2, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3, "weight_decay": 0.0}]
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / self.warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(batches: int = 16, batch_size: int = 4, ranks: int = 1) -> DataLoader:
    """Seeded regression data; ``batches`` for each rank."""
    noise = torch.Generator().manual_seed(7)
    x = torch.randn(batches * batch_size * ranks, 6, generator=noise)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), batch_size=batch_size)


def seeded(module: type[LightningModule], *args: Any, **kwargs: Any) -> LightningModule:
    """A module whose weights, and the dropout that follows, are the same each time."""
    torch.manual_seed(3)
    return module(*args, **kwargs)


def trainer(**kwargs: Any) -> Trainer:
    """A quiet Trainer on the CPU for some steps."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 16,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **kwargs})


def full(tensor: Any) -> Any:
    """The whole of a DTensor on every rank, a copy of another tensor, anything else as it is."""
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        return tensor.full_tensor()
    return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor


def observables(module: Any, run: Trainer) -> dict[str, Any]:
    """What must not differ between two runs: losses, rates, weights, optimizer state in order, groups, counters."""
    optimizers = run.strategy.optimizers
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        "losses": module.losses,
        "rates": module.rates,
        "weights": {name: full(p) for name, p in module.named_parameters()},
        "state": [
            [(names[id(p)], {k: full(v) for k, v in entry.items()}) for p, entry in optimizer.state.items()]
            for optimizer in optimizers
        ],
        "groups": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in optimizers
        ],
        "global_step": run.global_step,
    }


def alive_gradients(params: Iterator[nn.Parameter]) -> int:
    """How many parameters have a gradient at this moment."""
    return sum(p.grad is not None for p in params)
