"""Checkpoint files on the disk: reading and writing them whole, and what is said of those that cannot be read."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from torch.distributed.checkpoint import CheckpointException
from typing_extensions import override

from lightning_bwdopt import storage
from lightning_bwdopt.folders import Folder, NotStored, check_replaceable


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that cannot be read, or that does not fit the run. Nothing was changed.

    Both of the types that ``load_state_dict`` of modules and of optimizers raise.
    """


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's, for local files: they are renamed to their name when complete, and mapped into memory to be read.

    Lightning's own writes into the system's folder for temporary files and moves the result, which is a copy, and can
    be cut short, where that is another file system.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        check_replaceable(Path(path))
        storage.write_file(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if not _is_local_file_protocol(path) or not Path(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        mapped = zipfile.is_zipfile(path)  # torch's old format cannot be mapped
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        if _is_local_file_protocol(path):
            storage.remove(Path(path))
        else:
            super().remove_checkpoint(path)


@contextmanager
def explaining(path: _PATH) -> Iterator[None]:
    """Says of any failure to read which file it is about."""
    try:
        yield
    except (FileNotFoundError, CheckpointError):
        raise
    except NotStored as error:
        raise CheckpointError(f"`{path}` is not a complete checkpoint: {error}. Nothing was changed.") from error
    except (Exception, CheckpointException) as error:  # the latter is no `Exception`
        cut = "it is cut short, or no file that `torch.save` wrote; " if _is_no_archive(path) else ""
        raise CheckpointError(
            f"`{path}` cannot be read as a checkpoint: {cut}{type(error).__name__}: {error}"
        ) from error


def _is_no_archive(path: _PATH) -> bool:
    return _is_local_file_protocol(path) and Path(path).is_file() and not zipfile.is_zipfile(path)


def equalize_counters(checkpoint: dict[str, Any]) -> None:
    """Gives Lightning's step counters for automatic and for manual optimization the same value, in place.

    Each loop counts its own steps, and `global_step` reads one of them: an ordinary checkpoint resumed by the mixin, or
    the other way round, would start at 0.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    automatic = loop.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step")
    manual = loop.get("epoch_loop.manual_optimization.optim_step_progress")
    if not automatic or not manual:
        return
    for counter in ("ready", "completed"):
        steps = max(automatic["total"][counter], manual["total"][counter])
        automatic["total"][counter] = manual["total"][counter] = steps


def consolidate(folder: str | Path, file: str | Path) -> Path:
    """Turns a sharded checkpoint into one file, in a single process and without the model.

    The file resumes on any strategy of this package and on Lightning's single-device and DDP strategies, and is what
    ``LightningModule.load_from_checkpoint`` reads.

    Args:
        folder: What ``state_dict_type="sharded"`` wrote, here or with Lightning's ``ModelParallelStrategy``.
        file: Where the file goes; what is there is replaced.

    Returns:
        ``file``, as a path.

    Raises:
        CheckpointError: ``folder`` is not a complete sharded checkpoint.

    Example::

        module = Lit.load_from_checkpoint(consolidate("last.ckpt", "last.file.ckpt"))
        module.model.save_pretrained("exported")  # safetensors, where the model is one of `transformers`
    """
    with explaining(folder):
        checkpoint = Folder(Path(folder), alone=True).read_whole()
    for state in checkpoint.get("optimizer_states", []):
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        state["state"] = {
            numbers[name]: entry for name, entry in sorted(state["state"].items(), key=lambda e: numbers[e[0]])
        }
        for group in state["param_groups"]:
            group["params"] = [numbers[name] for name in group["params"]]
    check_replaceable(Path(file))
    storage.write_file(checkpoint, Path(file))
    return Path(file)
