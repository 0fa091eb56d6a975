"""Checkpoints of FSDP2: one file, or a folder (``state_dict_type="sharded"``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt import states, storage
from lightning_bwdopt.checkpoint_errors import CheckpointError, explaining
from lightning_bwdopt.checkpoints import Checkpoints, changed
from lightning_bwdopt.counters import equalize_saved
from lightning_bwdopt.folders import MODEL_KEY, Folder, FolderWriter, check_replaceable
from lightning_bwdopt.misfits import model_faults


class ShardedCheckpoints(Checkpoints, ModelParallelStrategy):
    """Loading and saving of FSDP2: as Lightning's ``ModelParallelStrategy`` writes, without changing the run by it.

    That one steps an optimizer without state on zero gradients, to save and to load.
    """

    _numbering = "model"
    _loaded_optimizers: list[dict[str, Any]] | None = None

    @property
    def _writer(self) -> FolderWriter:
        writer = vars(self).setdefault("_folder_writer", FolderWriter())
        assert isinstance(writer, FolderWriter)
        return writer

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    # Saving ---------------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return states.model_state(self.model, full=not self._save_distributed_checkpoint)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return states.optimizer_state(self.model, optimizer, full=not self._save_distributed_checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        path = self.broadcast(filepath)  # rank 0's: the others may have made up another name
        if not self._save_distributed_checkpoint:
            with self._together():
                if (local := storage.local_path(path)) is not None:
                    check_replaceable(local)
                Strategy.save_checkpoint(self, checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                f"`storage_options={storage_options!r}` is for checkpoint files, and `state_dict_type='sharded'` writes"
                " folders to the local file system. Leave it out, or use `'full'`."
            )
        folder = storage.needs_local(path, "`state_dict_type='sharded'` writes folders there. Use `'full'`")
        self._writer.wait()
        with self._together():
            check_replaceable(folder)
            if self.is_global_zero:
                storage.remove(storage.partial_path(folder))
        state = {MODEL_KEY: checkpoint.pop(MODEL_KEY)}
        for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer_state
        with self._together():
            self._writer.save(state, checkpoint, folder, beside=self._saves_beside())

    def _saves_beside(self) -> bool:
        """Whether training goes on while a folder is written: as asked for with Lightning's plugin for files."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status != TrainerStatus.RUNNING:
            return False
        plugin: Any = self._checkpoint_io
        while isinstance(plugin, _WrappingCheckpointIO):
            if isinstance(plugin, AsyncCheckpointIO):
                return True
            plugin = plugin.checkpoint_io
        return False

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            self._writer.wait()
        super().remove_checkpoint(filepath)

    @override
    def teardown(self) -> None:
        self._writer.close()
        self.checkpoint_io.teardown()  # `ModelParallelStrategy.teardown` leaves it out
        super().teardown()

    # Reading --------------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        self._writer.wait()
        self._loaded_optimizers = None
        found = self._find_folder(checkpoint_path) if self.is_global_zero else None
        path, folder = self.broadcast((checkpoint_path, found))
        if folder is None:
            return super().load_checkpoint(path, weights_only)
        self._checkpoint_path = path
        with explaining(path):
            checkpoint = self._load_folder(folder, weights_only)
        equalize_saved(checkpoint)
        return checkpoint

    @staticmethod
    def _find_folder(path: _PATH) -> Path | None:
        local = storage.local_path(path)
        if local is None:
            return None
        storage.recover(local)
        return local if local.is_dir() else None

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        fits = self._is_fitting()
        with self._together(), explaining(path):
            folder = Folder(path, alone=False)
            checkpoint = folder.meta(weights_only)
            keys = folder.optimizers()
            self._check_contents({**checkpoint, MODEL_KEY: {}, **({"optimizer_states": []} if keys else {})})
        tree, stored_as = folder.describe([MODEL_KEY, *(keys if fits else [])])
        weights = tree[MODEL_KEY]
        current = states.sharded_state(module)
        with self._together():
            self._check_weights(current, weights, module.strict_loading)
            matched = self._match_optimizers([tree[key] for key in keys], weights) if fits else []

        into: dict[str, Any] = {}

        def memory(stored: Tensor, like: Tensor) -> Tensor:
            if not stored.is_meta:
                return stored  # has been read with the description
            return into.setdefault(stored_as[id(stored)], states.empty_like(stored, like))

        optimizer_states = [changed(state, optimizer, memory) for state, optimizer in zip(matched, self.optimizers)]
        folder.read(into)
        into = {}
        for name in current.keys() & weights.keys():
            if isinstance(current[name], Tensor):
                into[stored_as[id(weights[name])]] = current[name]
            else:
                current[name] = states.map_tensors(weights[name], lambda t: memory(t, torch.empty(0)))
        folder.read(into)  # in place, and the last thing that can fail
        states.load_sharded_state(module, current)
        if fits:
            self._loaded_optimizers = checkpoint["optimizer_states"] = optimizer_states
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if MODEL_KEY not in checkpoint:
            return  # a folder: `load_checkpoint` has read it into place
        module = self.lightning_module
        assert module is not None
        current = states.sharded_state(module)
        saved = {states.clean_name(name): value for name, value in checkpoint[MODEL_KEY].items()}
        with self._together():
            self._check_weights(current, saved, strict)
            if self._is_fitting():
                self._match_optimizers(checkpoint["optimizer_states"], saved)
        placed = {
            name: states.placed_like(saved[name], value) if isinstance(value, Tensor) else saved[name]
            for name, value in current.items()
            if name in saved
        }
        states.load_sharded_state(module, placed)

    def _check_weights(self, current: Mapping[str, Any], saved: Mapping[str, Any], strict: bool) -> None:
        if faults := model_faults(current, saved, strict=strict):
            raise self._misfit(f"`{type(self.lightning_module).__name__}`", faults)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        loaded, self._loaded_optimizers = self._loaded_optimizers, None
        if loaded is None:
            matched = self._match_optimizers(checkpoint["optimizer_states"], checkpoint.get(MODEL_KEY, {}))
            loaded = [changed(*pair, states.placed_like) for pair in zip(matched, self.optimizers, strict=True)]
        for optimizer, state in zip(self.optimizers, loaded, strict=True):
            optimizer.load_state_dict(state)

    @contextmanager
    @override
    def _together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except (CheckpointError, OSError) as caught:
            error = caught
        reasons: list[str | None] = [None] * self.world_size
        dist.all_gather_object(reasons, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(f"Rank {rank} could not: {reason}")
