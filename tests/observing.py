"""Two runs side by side: everything that can be observed of a run, to be compared with an ordinary one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from helpers import Lit, assert_equal, full, loader, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimInBwdMixin, SingleDeviceOptimInBwdStrategy, sharding

LOOPS = ("automatic", "manual")  # the loops of the mode: a plain module's, the mixin's


class Records(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, {key: float(value) for key, value in metrics.items()}))


def _spied_hooks() -> list[str]:
    skipped = {"state_dict", "load_state_dict", "state_key"}
    return [name for name in vars(Callback) if not name.startswith("_") and name not in skipped]


class HookSpy(Callback):
    """Keeps which callback hook was called, in order, and the counters at that moment."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []


def _spy(name: str) -> Callable[..., None]:
    def hook(self: HookSpy, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        where = (trainer.global_step, epoch_loop._batches_that_stepped, epoch_loop.total_batch_idx)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.calls.append((name, *where, [float(rate) for rate in rates]))

    return hook


for _name in _spied_hooks():
    setattr(HookSpy, _name, _spy(_name))


def with_mixin(module: type[LightningModule]) -> type[LightningModule]:
    """The same module for the manual path; same name, since loggers and checkpoints show it."""
    return type(module.__name__, (OptimInBwdMixin, module), {"__module__": module.__module__})


def strategy_of(loop: str, ranks: int = 1, **options: Any) -> Any:
    """The strategy of a run: ``loop`` is ``"ordinary"`` or one of `LOOPS`."""
    make = SingleDeviceOptimInBwdStrategy if ranks == 1 else FSDPOptimInBwdStrategy
    return make(enabled=loop != "ordinary", **options)


def observe(
    loop: str,
    module: type[LightningModule] | Callable[[str], LightningModule] = Lit,
    *,
    ranks: int = 1,
    fit: Callable[[Trainer, Any], None] | None = None,
    options: dict[str, Any] | None = None,
    batches: int = 16,
    ignore: tuple[str, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Runs a fit and returns what can be observed of it.

    Args:
        loop: ``"ordinary"``, ``"automatic"`` or ``"manual"``.
        module: The class, to which ``"manual"`` adds the mixin.
        ranks: One: the single-device strategy; more: FSDP2.
        fit: What to do with the Trainer; by default a fit with validation.
        options: For the strategy.
        batches: Of training, per rank and epoch.
        ignore: Starts of warnings that only one of the runs gives.
        **kwargs: For the Trainer. Callables are called first: callbacks must not be shared by runs.
    """
    model = seeded(with_mixin(module) if loop == "manual" else module)
    spy, records = HookSpy(), Records()
    kwargs = {key: value() if callable(value) else value for key, value in kwargs.items()}
    callbacks = [*kwargs.pop("callbacks", []), spy]
    kwargs.setdefault("logger", records)
    if ranks > 1:
        kwargs.update(devices=ranks)
    run = trainer(
        **{"log_every_n_steps": 1, **kwargs}, strategy=strategy_of(loop, ranks, **options or {}), callbacks=callbacks
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fit is None:
            run.fit(model, loader(batches, ranks=ranks), loader(2, ranks=ranks))
        else:
            fit(run, model)
    weights = weights_of(model)
    return {
        "losses": getattr(model, "losses", None),
        "rates": getattr(model, "rates", None),
        "hooks": spy.calls,
        "logged": records.metrics,
        "global_step": run.global_step,
        "estimated": run.estimated_stepping_batches if run.train_dataloader is not None else None,
        "epoch": run.current_epoch,
        "metrics": {key: float(value) for key, value in run.callback_metrics.items()},
        "warnings": [str(w.message) for w in caught if not any(str(w.message).startswith(start) for start in ignore)],
        "files": checkpoints_in(Path(run.default_root_dir)) if "default_root_dir" in kwargs else {},
        "weights": weights,
        **optimizers_of(run, model),
    }


def weights_of(model: LightningModule) -> dict[str, Tensor]:
    """Copies of the whole weights."""
    sharding.reshard(model)
    return {name: full(p) for name, p in model.named_parameters()}


def checkpoints_in(folder: Path) -> dict[str, Any]:
    """What is in each checkpoint, but for the counter of the manual loop, in which runs may differ."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        content = torch.load(path, weights_only=False)
        if "loops" in content:
            del content["loops"]["fit_loop"]["epoch_loop.manual_optimization.optim_step_progress"]
        found[str(path.relative_to(folder))] = content
    return found


def optimizers_of(run: Trainer, model: LightningModule) -> dict[str, Any]:
    """The state and groups of each optimizer, under the names of the parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    optimizers = [o for o in run.strategy.optimizers if hasattr(o, "state")]
    return {
        "state": [
            [(names[id(p)], {k: full(v) for k, v in entry.items()}) for p, entry in optimizer.state.items()]
            for optimizer in optimizers
        ],
        "groups": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in optimizers
        ],
        "schedulers": [config.scheduler.state_dict() for config in run.strategy.lr_scheduler_configs],
    }


def assert_same_runs(
    *args: Any, loops: tuple[str, ...] = LOOPS, folder: Path | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The run of each loop of the mode equals the ordinary one in all that can be observed; the ordinary one's."""

    def once(loop: str) -> dict[str, Any]:
        if folder is None:
            return observe(loop, *args, **kwargs)
        run = observe(loop, *args, **kwargs, default_root_dir=folder / "run")  # checkpoints contain the path
        _on_one_rank((folder / "run").rename, folder / loop)
        return run

    ordinary = once("ordinary")
    for loop in loops:
        run = once(loop)
        for key in ordinary:
            assert_equal(run[key], ordinary[key], f"{loop}: {key}")
    return ordinary


def _on_one_rank(act: Callable[..., Any], *args: Any) -> None:
    """Does something to files when every rank has read them."""
    distributed = dist.is_initialized()
    if distributed:
        dist.barrier()
    if not distributed or dist.get_rank() == 0:
        act(*args)
    if distributed:
        dist.barrier()


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for entry in value for t in tensors(entry)] if isinstance(value, list | tuple) else []


def moved(weights: dict[str, Tensor], module: type[LightningModule]) -> bool:
    """Whether every weight differs from the one that the module starts with."""
    start = dict(seeded(module).named_parameters())
    return all(not torch.equal(weights[name], start[name]) for name in weights)
