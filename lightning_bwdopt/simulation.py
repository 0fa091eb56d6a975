"""One training config, run by Lightning itself on tensors that have no memory, and the peak of its steady state.

Model, data module, strategy and loop are the very ones of a `fit`, so every option of the strategy and of the Trainer
has the effect on memory that it has there. What differs: parameters, activations and batches are fake tensors, the
other ranks are pretended, and the config's callbacks and loggers are left out.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_bwdopt import memory
from lightning_bwdopt.configured import argument_error, configured_ranks, configured_strategy, on_gpu
from lightning_bwdopt.measured_step import MeasuredStep, StepMemory
from lightning_bwdopt.mode import InBackwardStrategy
from lightning_bwdopt.strategies import FSDPOptimInBwdStrategy

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_ENOUGH = 8  # steps and epochs that a shorter config is given, so that it comes to a steady state


def simulate(
    args: list[str], *, enabled: bool, world_size: int | None = None, real_weights: bool = False
) -> StepMemory:
    """Runs two steps of a config's ``fit`` without memory.

    Args:
        args: Command-line arguments of ``fit``, such as ``["--config", "train.yaml", "--data.batch_size=4"]``.
        enabled: Whether the optimizer steps in backward.
        world_size: Ranks to pretend; ``None``: ``num_nodes * devices`` of the config.
        real_weights: Build the model with real weights before they are dropped, for one that cannot be built without.

    Raises:
        ValueError: an argument, a strategy or an option that cannot be simulated.
        RuntimeError: the module does something that needs the values of tensors.

    Note:
        ``on_nonfinite`` is left out, for its checks read values. It holds one number for each parameter: real runs with
        ``"skip"`` peak within 256 bytes of the estimate (``tests/test_memory.py``).
    """
    run = _FakeTraining(real_weights)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what there is to warn of, a training says
        stack.enter_context(_explaining(run))
        _SimulationCLI(run, enabled, world_size, stack, args)
    return run.measured.result()


class _SimulationCLI(LightningCLI):
    """Parses what ``fit`` parses, and runs it under `_FakeTraining`."""

    def __init__(
        self, run: _FakeTraining, enabled: bool, world_size: int | None, stack: ExitStack, args: list[str]
    ) -> None:
        self._run = run
        self._enabled = enabled
        self._world_size = world_size
        self._stack = stack
        super().__init__(
            save_config_callback=None,
            load_from_checkpoint_support=False,
            parser_kwargs={"exit_on_error": False, "fit": {"exit_on_error": False}},
            args=["fit", *args],
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            known = self._parser("fit")._option_string_actions
            raise argument_error(str(error), known) from None

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config["fit"]["trainer"]
        trainer["callbacks"] = None
        trainer["logger"] = False
        self._run.dtype = _DTYPES.get(str(trainer["precision"]))
        self.parser.add_instantiator(self._run.build, LightningModule, subclasses=True)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        nodes = config["num_nodes"]
        world_size = configured_ranks(config) if self._world_size is None else self._world_size
        if world_size < 1:
            raise ValueError(f"`--world_size={world_size}` is no number of ranks. Pass 1 or more.")
        if world_size % nodes:
            raise ValueError(
                f"`--world_size={world_size}` cannot be spread over the config's `num_nodes: {nodes}`. Pass a multiple"
                " of it, or `--trainer.num_nodes=1`."
            )
        strategy = _simulated_strategy(config["strategy"], world_size)
        strategy.enabled = self._enabled
        if isinstance(strategy, FSDPOptimInBwdStrategy):
            self._stack.enter_context(memory.fake_process_group(world_size))
        plugins = config["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        trainer = super().instantiate_trainer(
            accelerator="cpu",
            devices=world_size // nodes,
            strategy=strategy,
            callbacks=[self._run.measured, *([_AcceleratorDefaults()] if on_gpu(config["accelerator"]) else [])],
            plugins=[_OneOfMany(), *(plugin for plugin in plugins if isinstance(plugin, Precision))],
            max_steps=-1 if config["max_steps"] == -1 else max(config["max_steps"], _ENOUGH),
            max_epochs=config["max_epochs"] and max(config["max_epochs"], _ENOUGH),
            min_steps=None,
            min_epochs=None,
            max_time=None,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            fast_dev_run=False,
            barebones=False,
            profiler=None,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.strategy.batch_to_device = self._run.to_device(trainer.strategy.batch_to_device)  # type: ignore[method-assign]
        return trainer


class _FakeTraining:
    """What a simulated run has instead of data: the ways in which model and batches come to be."""

    def __init__(self, real_weights: bool) -> None:
        self.dtype: torch.dtype | None = None  # that the precision converts the whole model to
        self.fake = memory.fake_mode()
        self.measured = MeasuredStep(functools.partial(memory.fake_tensors, self.fake))
        self.failure: Exception | None = None  # in building the model
        self._real_weights = real_weights

    def build(self, module_class: type[LightningModule], *args: Any, **kwargs: Any) -> LightningModule:
        """Builds the config's model; jsonargparse calls it."""
        with self._building():
            module = module_class(*args, **kwargs)
        memory.drop_data(module, self.fake)
        module._apply = functools.partial(memory.convert_parameters, module)  # type: ignore[method-assign]
        if self.dtype is not None:
            module.to(self.dtype)  # here, before a config's `optimizer` takes parameters that this replaces
        configure_model = module.configure_model

        @functools.wraps(configure_model)  # Lightning compares what it wraps with the hook that does nothing
        def built_without_data() -> None:
            with self._building():
                configure_model()
            memory.drop_data(module, self.fake)

        module.configure_model = built_without_data  # type: ignore[method-assign]
        # Lightning turns what is logged for a progress bar into numbers, bar or not.
        module.log = _log_nothing  # type: ignore[method-assign]
        module.log_dict = _log_nothing  # type: ignore[method-assign]
        return module

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            with nullcontext() if self._real_weights else memory.fake_tensors(self.fake):
                yield
        except Exception as error:  # jsonargparse would make a line of text of it
            self.failure = error
            raise

    def to_device(self, batch_to_device: Callable[..., Any]) -> Callable[..., Any]:
        """Lightning's way of a batch to its device, ending in fake tensors."""

        @functools.wraps(batch_to_device)
        def to_device(*args: Any, **kwargs: Any) -> Any:
            return memory.fake_copy(batch_to_device(*args, **kwargs), self.fake)

        return to_device


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what Lightning says about devices and seeds, and what torch does about operations that fail."""
    loggers = [
        logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "torch._subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _explaining(run: _FakeTraining) -> Iterator[None]:
    """Turns an operation that fake tensors cannot do into an error that names it, and where the user called it."""
    try:
        yield
    except (Exception, SystemExit) as caught:
        error = run.failure or caught
        activity = "a training step" if run.failure is None else "building the model"
        operation = memory.impossible_operation(error)
        if operation is None and run.failure is None:
            raise
        ours = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(__file__))
        trace = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in trace if not frame.filename.startswith(ours)]
        place = f" at `{frames[-1].line}` ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        if operation is None:
            reason = f"`{type(error).__name__}: {error}`{place}"
        else:
            reason = f"`{operation}`{place} needs the values of a tensor"
        if run.failure is None:
            remedy = "Leave `.item()`, `float()`, `print` and `if` on tensors out of the step; log tensors as they are."
        else:
            remedy = "Pass `--real_weights` to build it with data, which takes its memory on this machine."
        raise RuntimeError(
            f"The estimate fails at {activity}: {reason}. It works on fake tensors, which have shapes and no data."
            f" {remedy}"
        ) from error


class _AcceleratorDefaults(Callback):
    """Has the optimizers take the implementation that they would take for tensors on a GPU."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                plain = not any(isinstance(p, DTensor) for p in group["params"])
                if plain and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # as torch.optim.optimizer._default_to_fused_or_foreach


class _OneOfMany(LightningEnvironment):
    """Rank 0, whose other ranks seem to have been started by someone else."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


def _simulated_strategy(given: Any, world_size: int) -> InBackwardStrategy:
    """The config's strategy, ready to have its mode set.

    Raises:
        ValueError: it is none of this package's, or has an option that is not simulated.
    """
    strategy = configured_strategy(given, world_size)
    if isinstance(strategy, FSDPOptimInBwdStrategy) and strategy.cpu_offload:
        raise ValueError(
            "`cpu_offload=True` moves parameters, gradients and optimizer state to the host, and the copies on the way"
            " are not simulated. Estimate without it: the device then needs the unsharded parameters, the activations,"
            " the communication buffers and the temporaries of that estimate."
        )
    # Its checks read values, which fake tensors lack; see `simulate`.
    strategy.on_nonfinite = "ignore"
    return strategy


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of `LightningModule.log`."""
