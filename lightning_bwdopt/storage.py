"""Files and folders that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol  # private (Lightning 2.6)
from lightning.fabric.utilities.types import _PATH

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def local_path(path: _PATH) -> Path | None:
    """Where a path or a ``file://`` URL is on this machine; ``None`` for the URL of another place (``s3://…``)."""
    return Path(str(path).removeprefix("file://")) if _is_local_file_protocol(path) else None


def needs_local(path: _PATH, reason: str) -> Path:
    """:func:`local_path`, where nothing else will do.

    Raises:
        ValueError: with ``reason``, for the URL of another place.
    """
    if (local := local_path(path)) is None:
        raise ValueError(f"`{path}` is not on the local file system, and {reason}.")
    return local


def partial_path(path: Path) -> Path:
    """Where a save is written before it is complete. Not a name that anything takes for a checkpoint."""
    return path.with_name(f".{_shortened(path.name, 246)}.partial")


def previous_path(path: Path) -> Path:
    """Where a folder waits while another takes its name, if that needs two steps.

    When the process dies between the two, Lightning's ``ckpt_path="last"`` finds what waits for ``last.ckpt``, since
    the name begins and ends alike. What is there is deleted: it must not be a name that a user gives.
    """
    stem, suffix = _shortened(path.stem, 112), _shortened(path.suffix, 112)
    return path.with_name(f"{stem}.replaced-by-lightning_bwdopt{suffix}")


def _shortened(text: str, room: int) -> str:
    """Part of a name; of one with more bytes than there is room for its beginning, and a digest in place of the rest.

    What is added to a name that fits must not exceed the 255 bytes that file systems take. The same name always gives
    the same one: the next save finds what a kill left.
    """
    encoded = os.fsencode(text)
    return text if len(encoded) <= room else f"{text[:20]}-{hashlib.sha256(encoded).hexdigest()[:16]}"


def write_file(content: Any, path: Path) -> None:
    """Saves with ``torch.save``; under ``path`` there is the old file or the new one, never a part of it."""
    partial = partial_path(path)
    remove(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(content, partial)
    publish(path)


def save(content: Any, path: Path) -> None:
    """``torch.save`` that returns when the content is on the disk, and not only in the system's memory.

    Raises:
        OSError: the file cannot be written; what could be is removed.
    """
    try:
        torch.save(content, path)
    except RuntimeError as error:
        if "inline_container" not in str(error):  # torch's writer of files, which tells neither the file nor the cause
            raise
        path.unlink(missing_ok=True)
        raise OSError(f"`{path}` cannot be written; the disk may be full, or the folder read-only ({error})") from error
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def publish(path: Path) -> None:
    """Moves what was written at ``partial_path(path)`` to ``path``, over what is there."""
    partial, previous = partial_path(path), previous_path(path)
    _flush_names(partial)
    if not path.is_dir() and not partial.is_dir():
        os.replace(partial, path)
    elif not os.path.lexists(path):
        os.rename(partial, path)
    elif not _exchange(partial, path):
        # A folder cannot be renamed over.
        remove(previous)
        os.rename(path, previous)
        os.rename(partial, path)
        os.rename(previous, partial)
    _flush_names(path.parent)
    remove(partial)  # what was at `path`, where the two were swapped


def recover(path: Path) -> None:
    """Undoes the one interruption that leaves nothing at ``path``: between the renames of a swap in two steps."""
    previous = previous_path(path)
    if not os.path.lexists(path) and os.path.lexists(previous):
        os.rename(previous, path)


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder, if it is there. A folder that is half deleted has no name of its own."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        if not path.name.startswith("."):
            aside = partial_path(path)
            remove(aside)
            os.rename(path, aside)
            path = aside
        shutil.rmtree(path)


def _flush_names(folder: Path) -> None:
    """Has the system put on the disk which files a folder has; nothing where it is a file, or not supported."""
    if not folder.is_dir():
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, where the system and the file system can (Linux's ``renameat2``)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
