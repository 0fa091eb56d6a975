"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_path(path: Path) -> Path:
    """Where a save is written before it is complete. Not a name that anything takes for a checkpoint."""
    return path.with_name(f".{path.name}.partial")


def write_file(content: Any, path: Path) -> None:
    """Saves with ``torch.save``; under ``path`` there is the old file or the new one, never a part of it."""
    partial = partial_path(path)
    remove(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, partial)
    publish(path)


def publish(path: Path) -> None:
    """Moves what was written at ``partial_path(path)`` to ``path``, over what is there."""
    partial = partial_path(path)
    if not path.is_dir() and not partial.is_dir():
        os.replace(partial, path)
    elif not os.path.lexists(path):
        os.rename(partial, path)
    else:
        # A folder cannot be renamed over: swap the two, so that one of them is there at every moment.
        if not _exchange(partial, path):
            previous = path.with_name(f".{path.name}.previous")
            remove(previous)
            os.rename(path, previous)
            os.rename(partial, path)
            os.rename(previous, partial)
        remove(partial)


def recover(path: Path) -> None:
    """Undoes the one interruption that leaves nothing at ``path``: between the renames of a swap in two steps."""
    previous = path.with_name(f".{path.name}.previous")
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


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, where the system and the file system can (Linux's ``renameat2``)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
