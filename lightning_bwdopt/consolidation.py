"""One file from a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path

from lightning_bwdopt import storage
from lightning_bwdopt.checkpoint_errors import CheckpointError, explaining
from lightning_bwdopt.folders import Folder, check_replaceable


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
        FileNotFoundError: there is nothing at ``folder``.
        CheckpointError: ``folder`` is not a complete sharded checkpoint.

    Example::

        module = Lit.load_from_checkpoint(consolidate("last.ckpt", "last.file.ckpt"))
        module.model.save_pretrained("exported")  # safetensors, where the model is one of `transformers`
    """
    reason = "a sharded checkpoint is read, and its file written, on this machine. Copy it here"
    source, target = storage.needs_local(folder, reason), storage.needs_local(file, reason)
    storage.recover(source)
    if not source.exists():
        raise FileNotFoundError(f"There is nothing at `{folder}`. Pass the folder of a sharded checkpoint.")
    if source.is_file():
        raise CheckpointError(f"`{folder}` is a file already, not the folder of a sharded checkpoint. Use it as it is.")
    with explaining(folder):
        checkpoint = Folder(source, alone=True).read_whole()
    for state in checkpoint.get("optimizer_states", []):
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        state["state"] = {
            numbers[name]: entry for name, entry in sorted(state["state"].items(), key=lambda e: numbers[e[0]])
        }
        for group in state["param_groups"]:
            group["params"] = [numbers[name] for name in group["params"]]
    check_replaceable(target)
    storage.write_file(checkpoint, target)
    return target
