"""Sharded checkpoints: folders that all ranks write and read with `torch.distributed.checkpoint` (DCP).

DCP is imported where it is used: that takes as long as all the rest of `import lightning_bwdopt`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bwdopt import storage
from lightning_bwdopt.checkpoint_errors import NotStored
from lightning_bwdopt.states import map_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

META_FILE = "meta.pt"  # Lightning's name for what is not a tensor of the model or of an optimizer; written last
MODEL_KEY = "state_dict"
_MODEL_KEY_OF_FSDP1 = "model"  # in folders of Lightning's `FSDPStrategy`
_OWN_FILES = (META_FILE, ".metadata", ".metadata.tmp")


def is_folder_checkpoint(path: Path) -> bool:
    """Whether a path is a folder whose save was completed."""
    return path.is_dir() and (path / META_FILE).is_file()


def check_replaceable(path: Path) -> None:
    """Refuses to put a checkpoint in the place of a folder with other things in it.

    Raises:
        IsADirectoryError: ``path`` is such a folder.
    """
    if not path.is_dir() or path.is_symlink():
        return
    if other := [entry.name for entry in path.iterdir() if not _is_part(entry)]:
        raise IsADirectoryError(
            f"`{path}` is a folder with `{other[0]}` in it, which is no part of a checkpoint and would be deleted. Save"
            " to another path."
        )


class Folder:
    """A sharded checkpoint on the disk: what it holds, and reading that into tensors.

    Args:
        path: The folder.
        alone: Only this process reads it. Otherwise reading is a collective call.

    Raises:
        NotStored: it is another folder, its save did not complete, or files of it are missing or too short.
    """

    def __init__(self, path: Path, *, alone: bool) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self.path = path
        self._alone = alone
        if not is_folder_checkpoint(path):
            if not any(map(_is_part, path.iterdir())):
                raise NotStored("no file in this folder is part of one. Pass the path of the checkpoint itself")
            raise NotStored(f"it has no `{META_FILE}`, which is written last: its save did not complete")
        try:
            metadata = FileSystemReader(path).read_metadata()
        except Exception as error:
            raise NotStored(f"its `.metadata` cannot be read ({type(error).__name__}: {error})") from error
        if faults := list(_faults(path, metadata)):
            raise NotStored("; ".join(faults))
        self._stored: Mapping[str, Any] = metadata.state_dict_metadata
        self._paths: Mapping[str, tuple[Any, ...]] = {
            key: (MODEL_KEY, *path[1:]) if path[0] == _MODEL_KEY_OF_FSDP1 else path
            for key, path in metadata.planner_data.items()
        }

    def meta(self, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning keeps beside the tensors: counters, callbacks, schedulers."""
        return torch.load(self.path / META_FILE, map_location="cpu", weights_only=weights_only)

    def optimizers(self) -> list[str]:
        """The keys of the optimizers, in order."""
        found = {path[0] for path in self._paths.values() if str(path[0]).startswith("optimizer_")}
        return sorted(found, key=lambda key: int(key.removeprefix("optimizer_")))

    def describe(self, keys: Iterable[str]) -> tuple[dict[str, Any], dict[int, str]]:
        """The tree under some top-level keys, with tensors of the right shape and dtype on ``meta``.

        What is no tensor is read, and so are the tensors of parameter groups (a rate, for example).

        Returns:
            The tree, and ``id(tensor on meta) -> key in the folder`` for :meth:`read`.
        """
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

        keys = set(keys)
        leaves: dict[str, Any] = {}
        small: dict[str, Any] = {}
        flat_keys: dict[int, str] = {}
        for flat_key, path in self._paths.items():
            if path[0] not in keys:
                continue
            stored = self._stored[flat_key]
            if isinstance(stored, BytesStorageMetadata):
                small[flat_key] = None
            elif len(path) > 1 and path[1] == "param_groups":
                small[flat_key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                assert isinstance(stored, TensorStorageMetadata)
                leaves[flat_key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
                flat_keys[id(leaves[flat_key])] = flat_key
        self.read(small)
        leaves.update(small)
        tree = _nested({path: leaves[key] for key, path in self._paths.items() if key in leaves})
        for key in keys - {MODEL_KEY}:
            tree[key].setdefault("state", {})  # DCP leaves empty dicts out
        return tree, flat_keys

    def read(self, into: dict[str, Any]) -> None:
        """Reads tensors in place, and replaces what is no tensor; ``into`` is keyed by the keys in the folder."""
        import torch.distributed.checkpoint as dcp

        if not into:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            try:
                dcp.load(into, checkpoint_id=self.path, planner=planner, no_dist=self._alone)
            except dcp.CheckpointException as error:  # a `BaseException`
                raise RuntimeError(str(error)) from error

    def read_whole(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Everything, as whole tensors on the CPU: what the file of an ordinary full checkpoint holds.

        Optimizer states are by name, as the folder has them.
        """
        optimizers = self.optimizers()
        tree, flat_keys = self.describe([MODEL_KEY, *optimizers])
        into: dict[str, Any] = {}

        def allocate(tensor: Tensor) -> Tensor:
            if tensor.device.type != "meta":
                return tensor
            return into.setdefault(flat_keys[id(tensor)], torch.empty_like(tensor, device="cpu"))

        tree = map_tensors(tree, allocate)
        self.read(into)
        checkpoint = {**self.meta(weights_only), MODEL_KEY: tree[MODEL_KEY]}
        if optimizers:
            checkpoint["optimizer_states"] = [tree[key] for key in optimizers]
        return checkpoint


def _is_part(entry: Path) -> bool:
    return entry.suffix == ".distcp" or entry.name in _OWN_FILES


def _faults(path: Path, metadata: Metadata) -> Iterator[str]:
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            yield f"its shard `{name}` is missing"
        elif file.stat().st_size < size:
            yield f"its shard `{name}` has {file.stat().st_size} bytes instead of at least {size}"


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> Any:
    """The inverse of DCP's flattening: ``int`` in a path is the index of a list."""
    if () in flat:
        return flat[()]
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if branches and all(isinstance(key, int) for key in branches):
        return [_nested(branches[index]) for index in sorted(branches)]
    return {key: _nested(branch) for key, branch in branches.items()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Says of a failure to write which checkpoint it is about, on which ranks, and why."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a `BaseException`, whose text is tracebacks
        reasons = "; ".join(
            f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()
        )
        raise RuntimeError(f"Writing the checkpoint `{path}` failed. {reasons}") from error
    except Exception as error:
        raise RuntimeError(f"Writing the checkpoint `{path}` failed: {error}") from error


class FolderWriter:
    """Writes sharded checkpoints, beside training where that is asked for; one at a time."""

    def __init__(self) -> None:
        self._pending: tuple[Path, Future[None]] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None

    def __reduce__(self) -> tuple[type[FolderWriter], tuple[()]]:
        return FolderWriter, ()  # a copy of a strategy writes by itself

    def save(self, state: dict[str, Any], meta: dict[str, Any], path: Path, *, beside: bool) -> None:
        """Writes all tensors, then the metadata, then moves the folder to its name. A collective call.

        Nothing may be at ``storage.partial_path(path)``.

        Args:
            state: What :class:`Folder` reads back by key.
            meta: What is no tensor; rank 0's is written.
            path: The name of the folder; what is there is replaced.
            beside: Return when the tensors have been copied, and write in another thread.
        """
        import torch.distributed.checkpoint as dcp

        partial = storage.partial_path(path)
        if not beside:
            with _naming(path):
                dcp.save(state, checkpoint_id=partial)
            self._publish(meta, path)
            return
        if self._group is None:
            # A group of its own: its calls come from another thread, in another order on each rank.
            self._group = dist.new_group(backend="gloo")
            self._executor = ThreadPoolExecutor(max_workers=1)
        assert self._executor is not None
        meta = map_tensors(meta, Tensor.clone)
        written = dcp.async_save(state, checkpoint_id=partial, process_group=self._group)
        self._pending = (path, self._executor.submit(self._publish_after, written, meta, path))

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            RuntimeError: the save that was being written failed.
        """
        if self._pending is None:
            return
        path, done = self._pending
        self._pending = None
        with _naming(path):
            done.result()

    def close(self) -> None:
        """Waits, and gives the thread and the process group back."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _publish_after(self, written: Any, meta: dict[str, Any], path: Path) -> None:
        written.result()
        self._publish(meta, path)

    @staticmethod
    def _publish(meta: dict[str, Any], path: Path) -> None:
        if dist.get_rank() == 0:
            storage.save(meta, storage.partial_path(path) / META_FILE)
            storage.publish(path)
