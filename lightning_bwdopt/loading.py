"""Filling a model that was built on the meta device, each rank its share: from a checkpoint, or at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_bwdopt.views import local_tensor, shard_like


class _Place(NamedTuple):
    """Where a module keeps a parameter or buffer."""

    module: nn.Module
    key: str
    name: str

    def put(self, tensor: Tensor | None) -> None:
        tensors = self.module._parameters if self.key in self.module._parameters else self.module._buffers
        tensors[self.key] = tensor  # type: ignore[assignment]


def load_pretrained(module: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Loads safetensors into a module, sharded or not, one tensor at a time.

    Rank 0 reads; every tensor is broadcast and each rank keeps its shard, so that a rank holds its share of the model
    and one whole tensor. Call it on every rank. Tensors on the meta device get data; the others are overwritten.

    Args:
        module: The module whose names the checkpoint has, for example the ``transformers`` model inside a
            LightningModule. Values are cast to its dtypes.
        path: A ``.safetensors`` file, or a folder with one or several (with or without an index file).
        strict: Refuse a checkpoint that lacks a parameter or persistent buffer, or has one too many. One of the names
            of a tied weight is enough.

    Raises:
        FileNotFoundError: no safetensors at ``path``.
        KeyError: ``strict``, and the names differ.
        ValueError: a shape differs, or a file is no safetensors file.

    Example::

        def configure_model(self):
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(self.config)
            self.trainer.strategy.shard()
            load_pretrained(self.model, "folder/of/the/checkpoint")
    """
    checkpoint, shapes = _open_on_rank_zero(Path(path))
    for name, (tensor, places) in _match_names(_tensors(module), shapes, strict).items():
        whole = checkpoint.read(name).to(tensor.dtype) if checkpoint else torch.empty(tensor.shape, dtype=tensor.dtype)
        if _is_distributed():
            whole = whole.to(_broadcast_device()).contiguous()
            dist.broadcast(whole, src=0)
        _fill(tensor, places, whole)


def initialize(module: nn.Module) -> list[str]:
    """Fills what is still on the meta device as the unsharded model would have been initialized.

    Each module gets whole tensors for a moment, its ``reset_parameters`` (or the ``_init_weights`` of the
    ``transformers`` model that it belongs to) fills them, and each rank keeps its shard, on the host. With the same
    seed the values are those of the unsharded model where its modules initialize themselves in the order of
    ``module.modules()``; all ranks draw the numbers that rank 0 draws.

    Args:
        module: The model, sharded or not.

    Returns:
        Names of what no method fills; these stay on the meta device.
    """
    places_of = {id(tensor): places for tensor, places in _tensors(module, persistent=False) if tensor.is_meta}
    if not places_of:
        return []
    if _is_distributed():
        state = torch.get_rng_state().to(_broadcast_device())
        dist.broadcast(state, src=0)
        torch.set_rng_state(state.cpu())
    left: list[str] = []
    for holder, initializer in _initializers(module):
        own = {key: t for key, t in (*holder._parameters.items(), *holder._buffers.items()) if t is not None}
        waiting = {key: tensor for key, tensor in own.items() if id(tensor) in places_of}
        if not waiting:
            continue
        if initializer is None:
            left += [places_of[id(tensor)][0].name for tensor in waiting.values()]
            continue
        # Whole tensors for all of the module's: what has been loaded must survive the initializer.
        whole: dict[str, Tensor] = {}
        for key, tensor in own.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            whole[key] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            _Place(holder, key, key).put(whole[key])
        with torch.no_grad():
            initializer()
        for key, tensor in own.items():
            filled = getattr(holder, key)
            _Place(holder, key, key).put(tensor)
            if key in waiting:
                _fill(tensor, places_of.pop(id(tensor)), filled)
    return left


def _initializers(module: nn.Module, owner: Any = None) -> Iterator[tuple[nn.Module, Callable[[], Any] | None]]:
    """Each module with what fills its own tensors."""
    if hasattr(module, "_init_weights"):
        owner = module
    if owner is None:
        reset = getattr(module, "reset_parameters", None)
        yield module, reset if callable(reset) else None
    for child in module.children():
        yield from _initializers(child, owner)
    if owner is not None:  # `PreTrainedModel.initialize_weights` visits children first
        yield module, partial(owner._init_weights, module)


def _tensors(module: nn.Module, *, persistent: bool = True) -> list[tuple[Tensor, list[_Place]]]:
    """Each parameter and (persistent) buffer once, with every place that has it: tied weights have several."""
    found: dict[int, tuple[Tensor, list[_Place]]] = {}
    for prefix, holder in module.named_modules(remove_duplicate=False):
        for key, tensor in (*holder._parameters.items(), *holder._buffers.items()):
            if tensor is None or (persistent and key in holder._non_persistent_buffers_set):
                continue
            place = _Place(holder, key, f"{prefix}.{key}" if prefix else key)
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


def _fill(tensor: Tensor, places: list[_Place], whole: Tensor) -> None:
    """Writes this rank's part of ``whole``; a tensor on the meta device is replaced by one on the host."""
    part = whole.detach()
    if isinstance(tensor, DTensor):
        # As `torch.distributed.checkpoint.state_dict` cuts a full state dict; no public function of torch 2.13 does.
        sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        part = part[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    if not tensor.is_meta:
        local_tensor(tensor).detach().copy_(part)
        return
    filled: Tensor = part.to("cpu", tensor.dtype, copy=True).contiguous()
    if isinstance(tensor, DTensor):
        filled = shard_like(filled, tensor)
    if isinstance(tensor, nn.Parameter):
        filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
    for place in places:
        place.put(filled)


# The checkpoint, on rank 0 ------------------------------------------------------------------------------------------


_CONVERT = "convert other formats with `save_pretrained` or `safetensors.torch.save_file`"


class _Checkpoint:
    """Tensors of one or several safetensors files, by name."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"There is no `.safetensors` file at `{path}`{'' if path.exists() else ', which does not exist'}. Pass"
                f" such a file or the folder that has them; {_CONVERT}."
            )
        self._file_of: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None
        self.shapes: dict[str, torch.Size] = {}  # in the order of the files
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"`{file}` cannot be read as safetensors: it is cut short or of another format ({error}). Copy it"
                    f" again, or {_CONVERT}."
                ) from None
            with opened:
                for name in opened.keys():  # noqa: SIM118  # a file handle, not a dict
                    self._file_of[name] = file
                    self.shapes[name] = torch.Size(opened.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self._file_of[name]
        if self._opened is None or self._opened[0] != file:
            # One file at a time: the pages of a mapped file that have been read count as the process's memory.
            self._opened = (file, safe_open(str(file), framework="pt"))
        return self._opened[1].get_tensor(name)


def _open_on_rank_zero(path: Path) -> tuple[_Checkpoint | None, dict[str, torch.Size]]:
    """The checkpoint (``None`` elsewhere) and its shapes (everywhere). What fails on rank 0 is raised on every rank."""
    checkpoint: _Checkpoint | None = None
    answer: list[Any] = [None]
    if not _is_distributed() or dist.get_rank() == 0:
        try:
            checkpoint = _Checkpoint(path)
            answer = [checkpoint.shapes]
        except Exception as error:
            answer = [error]
    if _is_distributed():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return checkpoint, answer[0]


def _match_names(
    tensors: list[tuple[Tensor, list[_Place]]], shapes: dict[str, torch.Size], strict: bool
) -> dict[str, tuple[Tensor, list[_Place]]]:
    """What can be loaded, by name in the checkpoint and in its order."""
    known = {place.name: entry for entry in tensors for place in entry[1]}
    found: dict[int, str] = {}  # a tied weight may be there under each of its names
    for name in shapes:
        if name in known:
            found.setdefault(id(known[name][0]), name)
    missing = [places[0].name for tensor, places in tensors if id(tensor) not in found]
    surplus = [name for name in shapes if name not in known]
    if strict and (missing or surplus):
        raise KeyError(
            f"The checkpoint lacks {len(missing)} tensors of the model ({', '.join(missing[:3])}) and has"
            f" {len(surplus)} that the model lacks ({', '.join(surplus[:3])}). Pass the module whose names it has, such"
            " as `self.model`, or `strict=False` to load what matches."
        )
    for name in found.values():
        if shapes[name] != known[name][0].shape:
            raise ValueError(
                f"`{name}` has shape `{tuple(shapes[name])}` in the checkpoint and `{tuple(known[name][0].shape)}` in"
                " the model. Build the model with the configuration that the checkpoint was made with."
            )
    return {name: known[name] for name in found.values()}


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _broadcast_device() -> torch.device:
    """Where the default process group broadcasts: nccl knows the accelerator only."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
