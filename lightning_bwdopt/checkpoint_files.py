"""Checkpoint files on the disk: reading and writing them whole."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_bwdopt import storage
from lightning_bwdopt.folders import check_replaceable


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's, for local files: they are renamed to their name when complete, and mapped into memory to be read.

    Lightning's own writes into the system's folder for temporary files and moves the result, which is a copy, and can
    be cut short, where that is another file system.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        local = storage.local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        check_replaceable(local)
        storage.write_file(checkpoint, local)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = storage.local_path(path)
        if local is None or not local.is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        mapped = zipfile.is_zipfile(local)  # torch's old format cannot be mapped
        return torch.load(local, map_location=map_location, weights_only=weights_only, mmap=mapped)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        if (local := storage.local_path(path)) is None:
            super().remove_checkpoint(path)
        else:
            storage.remove(local)
