"""One of the two training runs of a comparison: the config's own ``fit`` for some steps, with its figures in files.

``python -m lightning_bwdopt.compared_run MODE STEPS FOLDER [arguments of fit]``. `compare.py` starts it in a process of
its own, Lightning starts the other ranks. Each rank leaves in the folder:

- ``rank0.jsonl``: losses, seconds and peak memory of each step, a line each, while it runs;
- ``rank0.pt``: its parameters, buffers and optimizer state when training has ended;
- the CSV file of its :class:`MemoryTimeline`;

and rank 0 ``facts.json``.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from typing_extensions import override

from lightning_bwdopt import sharding
from lightning_bwdopt.callbacks import MODES, MemoryTimeline
from lightning_bwdopt.configured import configured_ranks, configured_strategy
from lightning_bwdopt.mode import InBackwardStrategy
from lightning_bwdopt.process_memory import peak, restart_peak
from lightning_bwdopt.views import local_tensor

_SEED = 0  # of a config that asks for none


def timeline_step(steps: int) -> int:
    """The step, of so many, whose memory is recorded over its time."""
    return steps // 2


class Figures(Callback):
    """Writes what a comparison needs to know of a run, and keeps the run from writing checkpoints.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = ""
        self._begun_at: int | None = None  # the `global_step` of the step that is made; none between steps
        self._losses: dict[str, list[float]] = {}  # of the step's micro-batches so far
        self._start = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._model = type(pl_module).__name__  # `fully_shard` is about to change the class
        # Those of the config, of `LightningModule.configure_callbacks`, and Lightning's own.
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            assert isinstance(trainer.strategy, InBackwardStrategy)
            facts = {
                "model": self._model,
                "strategy": type(trainer.strategy).__name__,
                "world_size": trainer.world_size,
                "device": str(trainer.strategy.root_device.type),
                "precision": trainer.precision,
                "parameters": sum(p.numel() for p in pl_module.parameters()),
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clipping": trainer.strategy.gradient_clipping,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
            (self._folder / "facts.json").write_text(json.dumps(facts))

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._begun_at is None:
            self._begun_at = trainer.global_step
            restart_peak(trainer.strategy.root_device)
            self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        for name, loss in _losses(trainer, outputs).items():
            self._losses.setdefault(name, []).append(loss)
        if trainer.global_step == self._begun_at:
            return  # a micro-batch, be it the Trainer that accumulates or user code
        self._begun_at = None
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # else the clock stops before the step has run
        seconds = time.perf_counter() - self._start
        step = {"losses": self._losses, "seconds": seconds, "peak_bytes": peak(device)}
        with (self._folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(step) + "\n")
        self._losses = {}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(tensors(trainer, pl_module), self._folder / f"rank{trainer.global_rank}.pt")
        trainer.strategy.barrier()  # rank 0's end is that of the run


def _losses(trainer: Trainer, outputs: Any) -> dict[str, float]:
    """What `training_step` returned, or what it logged under such a name."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor):
        return {"loss": loss.item()}
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "loss" in name}


def tensors(trainer: Trainer, module: LightningModule) -> dict[str, dict[str, Any]]:
    """This rank's part of the parameters and buffers, and of the optimizers' state, by name."""
    sharding.reshard(module)
    held = {name: local_tensor(t.detach()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    names = {id(p): name for name, p in module.named_parameters()}
    state: dict[str, Any] = {}
    for index, optimizer in enumerate(trainer.optimizers):
        for param, entry in optimizer.state.items():
            for key, value in entry.items():
                state |= _plain(f"{index}: {names.get(id(param))}: {key}", value)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    state |= _plain(f"{index}: group {number}: {key}", value)
    return {"parameters": held, "optimizer_state": state}


def _plain(name: str, value: Any) -> dict[str, Any]:
    """An entry as tensors, numbers and text, of a list each element: what is loaded without unpickling code."""
    if isinstance(value, list | tuple):
        return {key: part for i, element in enumerate(value) for key, part in _plain(f"{name}[{i}]", element).items()}
    if isinstance(value, Tensor):
        return {name: local_tensor(value.detach())}
    if isinstance(value, bool | int):
        return {name: value}
    return {name: float(value) if isinstance(value, float) else repr(value)}  # a float may be numpy's


class ComparedCLI(LightningCLI):
    """Runs a config's ``fit`` in one of the modes; its checkpoints, loggers and bars are left out.

    Args:
        mode: One of ``MODES``.
        steps: How many optimizer steps; the schedules that are drawn over the whole run are drawn over these.
        folder: Where the figures go, and what callbacks write to the Trainer's folder.
        args: Arguments of ``fit``.
    """

    def __init__(self, mode: str, steps: int, folder: Path, args: list[str]) -> None:
        self._mode = mode
        self._steps = steps
        self._folder = folder
        super().__init__(
            save_config_callback=None,
            parser_kwargs={"fit": {"prog": "lightning-bwdopt compare"}},
            args=["fit", *args],
        )

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config["fit"]
        config["trainer"]["logger"] = False
        if config["ckpt_path"]:
            raise ValueError(
                f"`--ckpt_path={config['ckpt_path']}` goes on with a run that has been; the two runs that are compared"
                " begin. Leave it out, or start the model from those weights."
            )
        if config["trainer"]["num_nodes"] > 1:
            raise ValueError(
                f"`num_nodes: {config['trainer']['num_nodes']}`: the two runs are started on this machine alone. Pass"
                " `--trainer.num_nodes=1`; the mode does the same on any number."
            )
        if config["seed_everything"] is False:
            seed_everything(_SEED, workers=True)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        ranks = configured_ranks(config) if config["strategy"] == "auto" else 0
        strategy = configured_strategy(config["strategy"], ranks)
        strategy.enabled = self._mode == "in backward"
        callbacks = config["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        return super().instantiate_trainer(
            strategy=strategy,
            callbacks=[
                *(callback for callback in callbacks if not isinstance(callback, ProgressBar | ModelSummary)),
                MemoryTimeline(timeline_step(self._steps), self._folder, draw=False),
                Figures(self._folder),
            ],
            logger=DummyLogger(),  # callbacks and modules that log go on as if it were theirs
            default_root_dir=self._folder / "outputs",
            max_steps=self._steps,
            max_epochs=-1,
            min_steps=None,
            min_epochs=None,
            max_time=None,
            fast_dev_run=False,
            barebones=False,
            profiler=None,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def end_with_parent() -> None:
    """Has Linux kill this process when its parent ends, however that ends; elsewhere it does nothing."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> None:
    """Runs it; the arguments are the process's, for Lightning starts the other ranks with the same."""
    mode, steps, folder, *args = sys.argv[1:]
    assert mode in MODES
    end_with_parent()  # the other ranks are rank 0's children, and run this, too
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")  # `sys.argv` is for the other ranks
    ComparedCLI(mode, int(steps), Path(folder), args)


if __name__ == "__main__":
    main()
