"""What is said of checkpoints that cannot be read."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.types import _PATH

from lightning_bwdopt import storage


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that cannot be read, or that does not fit the run. Nothing was changed.

    Both of the types that ``load_state_dict`` of modules and of optimizers raise.
    """


class NotStored(Exception):
    """A folder that is not a complete checkpoint; the message says what is missing."""


@contextmanager
def explaining(path: _PATH) -> Iterator[None]:
    """Says of any failure to read which file it is about."""
    try:
        yield
    except (FileNotFoundError, CheckpointError):
        raise
    except NotStored as error:
        raise CheckpointError(f"`{path}` is not a complete checkpoint: {error}. Nothing was changed.") from error
    except Exception as error:
        cut = "it is cut short, or no file that `torch.save` wrote; " if _is_no_archive(path) else ""
        raise CheckpointError(
            f"`{path}` cannot be read as a checkpoint: {cut}{type(error).__name__}: {error}"
        ) from error


def _is_no_archive(path: _PATH) -> bool:
    local = storage.local_path(path)
    return local is not None and local.is_file() and not zipfile.is_zipfile(local)
