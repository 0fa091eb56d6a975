"""Full fine-tuning of a causal language model with the optimizer in backward: a LightningCLI program.

Example::

    python -m examples.full_finetune fit --config examples/configs/full_finetune_distributed.yaml
    python -m examples.full_finetune fit --config … --trainer.strategy=fsdp_optim_in_bwd --data.path=my.jsonl
"""

import inspect
import re
import warnings
from importlib import import_module
from typing import NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

import lightning_bwdopt  # noqa: F401  # registers the strategies' names
from examples.causal_lm import CausalLM
from examples.errors import InputError
from examples.recipe_callbacks import FinetuneProgressBar, FinetuneReport, TrainingMonitor
from examples.text_data import RandomTokenDataModule, TextDataModule

__all__ = [
    "CausalLM",
    "FinetuneProgressBar",
    "FinetuneReport",
    "RandomTokenDataModule",
    "TextDataModule",
    "TrainingMonitor",
    "main",
]


class FinetuneParser(LightningArgumentParser):
    """A parser that says which arguments a class takes, where it was given another one."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", message)
        if unknown is None:
            super().error(message, ex)
        class_path, name = unknown.groups()
        module, _, class_name = class_path.rpartition(".")
        parameters = inspect.signature(getattr(import_module(module), class_name)).parameters.values()
        known = ", ".join(f"`{parameter.name}`" for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD)
        self.exit(
            2,
            f"error: `{name}` is no argument of `{class_path}`, so it would have no effect: correct or remove it. It"
            f" takes {known}.\n",
        )


class FinetuneCLI(LightningCLI):
    """LightningCLI that reads the data before Lightning starts the other ranks, so that a fault is reported once."""

    @override
    def before_instantiate_classes(self) -> None:
        # The batches lie in memory: worker processes would only cost.
        warnings.filterwarnings("ignore", ".*does not have many workers which may be a bottleneck.*")

    def before_fit(self) -> None:
        """Runs in each process before ``Trainer.fit``."""
        if isinstance(self.datamodule, TextDataModule):
            self.datamodule.read()


def main(args: ArgsType = None) -> FinetuneCLI:
    """Runs the command line.

    Args:
        args: In place of the process's own arguments.

    Returns:
        The finished CLI, with ``trainer``, ``model`` and ``datamodule``.

    Raises:
        SystemExit: What the user gave cannot work; the message says why and what to do.
    """
    try:
        return FinetuneCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=FinetuneParser,
            args=args,
        )
    except ValueError as error:
        fault: BaseException | None = error
        while fault is not None and not isinstance(fault, InputError):
            fault = fault.__cause__  # jsonargparse wraps what a constructor raises
        if fault is None:
            raise
        # Every rank meets the same fault: the first one tells.
        raise SystemExit(f"error: {fault}" if getattr(rank_zero_only, "rank", 0) == 0 else 1) from None


if __name__ == "__main__":
    main()
