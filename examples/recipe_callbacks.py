"""What the recipe shows while it runs and leaves behind at its end."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from typing_extensions import override

from examples.causal_lm import CausalLM
from examples.hf_models import save_folder
from lightning_bwdopt import get_lr

MIB = 2**20


def peak_memory_mib(device: torch.device) -> float:
    """Returns the most memory this process has held so far, in MiB.

    On a GPU what torch allocated there since training began; on a CPU the resident set of the process since it
    started, loading included (only CUDA's peak can be reset).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB on Linux


class TrainingMonitor(Callback):
    """Logs learning rate, tokens per second and peak memory at each step, for the progress bar and the loggers.

    ``lr`` is the rate of this step's update, that of the first parameter group. ``tokens_per_second`` counts the tokens
    of all data-parallel ranks. ``peak_memory_mib`` is this rank's.

    Attributes:
        peak_memory_mib: The peak as of the last step: validation and saving after it do not count.
    """

    def __init__(self) -> None:
        self.peak_memory_mib = 0.0
        self._started = 0.0
        self._steps: list[tuple[int, float]] = []  # tokens and seconds of each

    @property
    def tokens_per_second(self) -> float:
        """The mean over all steps but the first, which also warms up; 0 before the first step's end."""
        steps = self._steps[1:] or self._steps
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps) if steps else 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.clear()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        # Here, for at the end of the batch the scheduler has already set the next step's rate.
        pl_module.log("lr", get_lr(trainer.optimizers[0])[0], prog_bar=True)
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # else the clock stops before the step has run
        seconds = time.perf_counter() - self._started
        replicas = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        tokens = batch["input_ids"].numel() * replicas
        self._steps.append((tokens, seconds))
        pl_module.log("tokens_per_second", tokens / seconds, prog_bar=True)
        self.peak_memory_mib = peak_memory_mib(pl_module.device)
        pl_module.log("peak_memory_mib", self.peak_memory_mib, prog_bar=True)


class FinetuneProgressBar(TQDMProgressBar):
    """Lightning's bar, with large figures as whole numbers: ``3140`` where it would show ``3.14e+3``."""

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = {**super().get_metrics(trainer, pl_module)}
        for name in ("tokens_per_second", "peak_memory_mib"):
            if name in metrics:
                metrics[name] = f"{metrics[name]:.0f}"
        return metrics


class FinetuneReport(Callback):
    """Measures the held-out loss before and after training, and ends with a table, ``summary.json`` and a model folder.

    The loss before comes from Lightning's check before training: set ``Trainer(num_sanity_val_steps=-1)``, so that it
    validates on everything that the later validations use. The loss after is the last validation's; where training
    ended since then, one more is run. A resumed run keeps the loss before of the run that it continues.

    Beside the checkpoint it writes ``summary.json`` and, with ``save_transformers``, the folder ``transformers``:
    configuration, weights as safetensors and tokenizer, for ``AutoModelForCausalLM.from_pretrained``.

    For a ``CausalLM``, whose metrics and continuation it reads.

    Args:
        save_transformers: Whether to write that folder. It gathers the whole model on the first rank's CPU.
    """

    def __init__(self, save_transformers: bool = True) -> None:
        self.save_transformers = save_transformers
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}
        self._validated_step = -1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["before"]

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        result = {
            "loss": metrics["val_loss"].item(),
            "perplexity": metrics["val_perplexity"].item(),
            "accuracy": metrics["val_accuracy"].item(),
            "continuation": pl_module.continuation,
        }
        if trainer.sanity_checking:
            self._before = result
        else:
            self._after = result
            self._validated_step = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.enable_validation and self._validated_step != trainer.global_step:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The last hook of `fit`: ModelCheckpoint, which Lightning always calls after the other callbacks, is done.
        assert isinstance(pl_module, CausalLM)
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "") or None
        logs = trainer.log_dir or trainer.default_root_dir  # on every rank: the property asks the first one
        folder = Path(checkpoint).parent if checkpoint else Path(logs)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's connector sets it
        monitor = next((callback for callback in callbacks if isinstance(callback, TrainingMonitor)), None)
        peak = torch.tensor(
            monitor.peak_memory_mib if monitor else peak_memory_mib(pl_module.device), device=pl_module.device
        )
        summary = {
            "val_loss_before": self._before.get("loss"),
            "val_loss_after": self._after.get("loss"),
            "strategy": describe_strategy(trainer),
            "steps": trainer.global_step,
            "tokens_per_second": monitor.tokens_per_second if monitor else None,
            "peak_memory_mib": trainer.strategy.reduce(peak, reduce_op="max").item(),
            "checkpoint": checkpoint,
        }
        model_folder = folder / "transformers" if self.save_transformers else None
        if model_folder is not None:
            save_transformers_folder(pl_module, model_folder)
        self._finish(pl_module, summary, folder, model_folder, logs)

    @rank_zero_only
    def _finish(
        self, pl_module: CausalLM, summary: dict[str, Any], folder: Path, model_folder: Path | None, logs: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        summary_file = folder / "summary.json"
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")
        lines = [f"{'':22}{'before':>12}{'after':>12}"]
        for name, label in (("loss", "held-out loss"), ("perplexity", "held-out perplexity"), ("accuracy", "accuracy")):
            values = [state.get(name) for state in (self._before, self._after)]
            lines.append(f"{label:22}" + "".join("           -" if v is None else f"{v:12.4f}" for v in values))
        if pl_module.continuation is not None:
            lines.append(f"prompt                {pl_module.prompt!r}")
            lines.append(f"  before              {self._before.get('continuation')!r}")
            lines.append(f"  after               {self._after.get('continuation')!r}")
        lines += [
            f"strategy              {summary['strategy']}",
            f"steps                 {summary['steps']}",
            f"tokens per second     {summary['tokens_per_second'] or 0:.0f}",
            f"peak memory           {summary['peak_memory_mib']:.0f} MiB on the fullest rank",
            f"checkpoint            {summary['checkpoint']}",
            f"transformers folder   {model_folder}",
            f"summary               {summary_file}",
            f"logs                  {logs}",
        ]
        print("\n" + "\n".join(lines), flush=True)
        if self._before and self._after and self._after["loss"] >= self._before["loss"]:
            print("The held-out loss did not fall: train for more steps, or try another `learning_rate`.", flush=True)


def describe_strategy(trainer: Trainer) -> str:
    """Names the strategy's class and whether its mode is on, such as ``FSDPOptimInBwdStrategy(enabled=True)``."""
    strategy = trainer.strategy
    enabled = getattr(strategy, "enabled", None)
    return type(strategy).__name__ + ("" if enabled is None else f"(enabled={enabled})")


def save_transformers_folder(module: CausalLM, folder: Path) -> None:
    """Writes the trained model for ``from_pretrained``. Every rank must call it: sharded weights are gathered.

    Args:
        module: The trained module.
        folder: Where to; the first rank writes.
    """
    # From the LightningModule, not from its model: it is the root of the sharding, and its state dict hook reshards
    # what an evaluation has left gathered.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_model_state_dict(module, options=options)
    if module.global_rank == 0:
        assert module.model is not None
        weights = {
            name.removeprefix("model."): value
            for name, value in state_dict.items()
            if name.startswith("model.") and isinstance(value, Tensor)
        }
        save_folder(folder, module.model, weights, module.tokenizer)
