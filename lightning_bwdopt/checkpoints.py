"""Checkpoints: the strategies' saving and loading, in the formats of Lightning's own strategies.

Each is written aside and moved to its name when complete. What is read is first compared with the model and the
optimizers: a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bwdopt import sharding, states, storage
from lightning_bwdopt.checkpoint_errors import CheckpointError, explaining
from lightning_bwdopt.checkpoint_files import FileCheckpointIO
from lightning_bwdopt.consolidation import consolidate
from lightning_bwdopt.counters import equalize_saved
from lightning_bwdopt.folders import MODEL_KEY, Folder
from lightning_bwdopt.matching import Convention, matched_state
from lightning_bwdopt.misfits import Misfit

__all__ = ["CheckpointError", "Checkpoints", "consolidate"]


class Checkpoints(Strategy):
    """Loading and saving of a strategy with plain tensors: Lightning's own way, checked, and written atomically."""

    _numbering: Convention = "group"
    _checkpoint_path: _PATH = ""
    _weights_before: dict[str, Any] | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Where checkpoint files go. As in Lightning, the default is made here, when it is first asked for."""
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FileCheckpointIO()  # without effect where it wraps another already
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        self._checkpoint_io = plugin

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        names = states.clean_names(state)
        if all(name == clean for name, clean in names.items()):
            return state  # with the versions of its modules
        return {names[name]: value for name, value in state.items()}

    # Reading --------------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._checkpoint_path = self.broadcast(checkpoint_path)
        with self._together():
            checkpoint = self._read(path, weights_only)
            self._check_contents(checkpoint)
        equalize_saved(checkpoint)
        return checkpoint

    def _read(self, path: _PATH, weights_only: bool | None) -> dict[str, Any]:
        with explaining(path):
            if (local := storage.local_path(path)) is not None:
                storage.recover(local)
                if local.is_dir():
                    return Folder(local, alone=True).read_whole(weights_only)
            return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def _check_contents(self, checkpoint: Any) -> None:
        path = self._checkpoint_path
        if not isinstance(checkpoint, dict) or MODEL_KEY not in checkpoint:
            raise CheckpointError(
                f"`{path}` has no `{MODEL_KEY}`: it is not a checkpoint that a Trainer saved. Load plain weights with"
                " `load_state_dict` of the module, in `configure_model` or before `fit`."
            )
        if not self._is_fitting():
            return
        if "optimizer_states" not in checkpoint:
            raise CheckpointError(
                f"`{path}` holds weights only (`save_weights_only=True`), and `fit(ckpt_path=…)` also needs optimizers,"
                " schedulers and counters. To start from the weights, load them before `fit`: `load_from_checkpoint`,"
                f" or `module.load_state_dict(torch.load(path)['{MODEL_KEY}'])`."
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        current = module.state_dict()
        # Optimizers do not exist yet. Where the rest of the checkpoint turns out not to fit them, weights go back.
        self._weights_before = states.map_tensors(current, lambda t: t.detach().clone()) if self._is_fitting() else None
        own_names = {states.clean_name(name): name for name in current}
        saved = {
            name if name in current else own_names.get(states.clean_name(name), name): value
            for name, value in checkpoint[MODEL_KEY].items()
        }
        try:
            module.load_state_dict(saved, strict=strict)
        except RuntimeError as error:
            self._restore_weights()
            raise self._misfit("the weights", [str(error)]) from error

    def _restore_weights(self) -> None:
        if self._weights_before is not None:
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(self._weights_before, strict=False)
        self._weights_before = None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        try:
            matched = self._match_optimizers(checkpoint["optimizer_states"], checkpoint.get(MODEL_KEY, {}))
        except CheckpointError:
            self._restore_weights()
            raise
        self._weights_before = None
        for optimizer, state in zip(self.optimizers, matched, strict=True):
            optimizer.load_state_dict(changed(state, optimizer, states.placed_like))
            _optimizer_to_device(optimizer, self.root_device)

    def _match_optimizers(self, saved: list[dict[str, Any]], weights: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved optimizer states, numbered for ``load_state_dict``; an error where one does not fit."""
        module = self.lightning_module
        assert module is not None
        if len(saved) != len(self.optimizers):
            reason = f"it has the states of {len(saved)} optimizers, and there are {len(self.optimizers)}"
            raise self._misfit("the optimizers", [reason])
        sharding.reshard(module)
        names = states.parameter_names(module)
        weights = {states.clean_name(name): value for name, value in weights.items()}
        matched = []
        for index, (optimizer, state) in enumerate(zip(self.optimizers, saved, strict=True)):
            try:
                matched.append(
                    matched_state(
                        module,
                        optimizer,
                        state,
                        names=names,
                        native=self._numbering,
                        strict=module.strict_loading,
                        saved_weights=weights,
                    )
                )
            except Misfit as error:
                what = f"optimizer {index}, `{type(optimizer).__name__}`"
                raise self._misfit(what, list(error.args)) from None
        return matched

    def _misfit(self, what: str, reasons: list[str]) -> CheckpointError:
        return CheckpointError(
            f"`{self._checkpoint_path}` does not fit {what}: {'; '.join(reasons)}. Nothing was changed. Resume with the"
            " model and the optimizers that it was saved with, or load only its weights before `fit`."
        )

    def _is_fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    @contextmanager
    def _together(self) -> Iterator[None]:
        """An error on one rank is an error on all of them: none may go on alone."""
        yield


def changed(state: dict[str, Any], optimizer: Optimizer, change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """An optimizer state dict with ``change(tensor, parameter)`` in place of the states' tensors."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def changed_entry(number: int) -> Any:
        return states.map_tensors(state["state"][number], lambda tensor: change(tensor, params[number]))

    return {**state, "state": {number: changed_entry(number) for number in state["state"]}}
