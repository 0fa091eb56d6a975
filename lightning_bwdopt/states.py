"""A sharded model's state as whole tensors on rank 0, and whole tensors as shards of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_bwdopt import sharding
from lightning_bwdopt.views import local_tensor, shard_like

BUCKET_BYTES = 32 * 2**20  # what each rank sends in one collective; rank 0 holds this times the number of ranks
_ALIGNMENT = 16  # of each tensor in a bucket: no dtype is wider


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor in it replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(entry, change) for entry in value)
    return value


# Names and positions ------------------------------------------------------------------------------------------------


def clean_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """``name -> clean_name(name)``.

    Raises:
        ValueError: two of them become one, so that a checkpoint would lose what is under the other.
    """
    cleaned = {name: clean_name(name) for name in names}
    first: dict[str, str] = {}
    for name, clean in cleaned.items():
        if first.setdefault(clean, name) != name:
            raise ValueError(
                f"`{first[clean]}` and `{name}` have one name in a checkpoint, `{clean}`: `_orig_mod` and"
                " `_checkpoint_wrapped_module` are what torch puts into names, and left out. Give the module another."
            )
    return cleaned


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id(parameter) -> name``, in the order of ``module.parameters()``."""
    named = dict(module.named_parameters())
    return {id(named[name]): clean for name, clean in clean_names(named).items()}


# Whole tensors on rank 0 --------------------------------------------------------------------------------------------


def gather(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Whole copies on the CPU of DTensors, for rank 0. A collective call.

    Shards travel in buckets, so that the number of collectives grows with the bytes and not with the tensors.

    Args:
        tensors: The same on every rank, in the same order. Plain tensors are passed over.

    Returns:
        ``id(tensor) -> whole tensor`` on rank 0, an empty dict on the others.
    """
    whole: dict[int, Tensor] = {}
    buckets: dict[tuple[DeviceMesh, int], list[DTensor]] = {}
    filled: dict[tuple[DeviceMesh, int], int] = {}
    seen: set[int] = set()
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        mesh_dim = _sharded_mesh_dim(tensor)
        if mesh_dim is None:
            _gather_alone(tensor, whole)
            continue
        key = (tensor.device_mesh, mesh_dim)
        size = _padded_bytes(tensor, mesh_dim)
        if key in buckets and filled[key] + size > BUCKET_BYTES:
            _gather_bucket(buckets.pop(key), mesh_dim, whole)
        if key not in buckets:
            buckets[key], filled[key] = [], 0
        buckets[key].append(tensor)
        filled[key] += size
    for (_, mesh_dim), bucket in buckets.items():
        _gather_bucket(bucket, mesh_dim, whole)
    return whole


def _sharded_mesh_dim(tensor: DTensor) -> int | None:
    """The one mesh dimension that the tensor is split over in plain chunks; ``None`` where it is not that simple."""
    split = [dim for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    return split[0] if len(split) == 1 and type(tensor.placements[split[0]]) is Shard else None


def _gather_alone(tensor: DTensor, whole: dict[int, Tensor]) -> None:
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # offloaded shards travel over the device of the mesh
    assert isinstance(on_mesh, DTensor)
    full = on_mesh.full_tensor()
    if dist.get_rank() == 0:
        whole[id(tensor)] = full.cpu()


def _chunk_shape(tensor: DTensor, mesh_dim: int, rank: int) -> tuple[int, list[int]]:
    """Where the shard of a rank begins in the split dimension, and its shape."""
    place = tensor.placements[mesh_dim]
    assert isinstance(place, Shard)
    length = tensor.shape[place.dim]
    chunk = -(-length // tensor.device_mesh.size(mesh_dim))  # as `torch.chunk`: the last ranks may have less or nothing
    start = min(rank * chunk, length)
    shape = list(tensor.shape)
    shape[place.dim] = min(start + chunk, length) - start
    return start, shape


def _padded_bytes(tensor: DTensor, mesh_dim: int) -> int:
    size = torch.Size(_chunk_shape(tensor, mesh_dim, 0)[1]).numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _gather_bucket(bucket: Sequence[DTensor], mesh_dim: int, whole: dict[int, Tensor]) -> None:
    mesh = bucket[0].device_mesh
    group = mesh.get_group(mesh_dim)
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return  # a replica of what another group sends to rank 0
    sizes = [_padded_bytes(tensor, mesh_dim) for tensor in bucket]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=mesh.device_type)
    for tensor, piece in zip(bucket, packed.split(sizes), strict=True):
        content = local_tensor(tensor).detach().contiguous().flatten().view(torch.uint8)
        piece[: content.numel()].copy_(content)
    receives = dist.get_rank() == 0
    parts = [torch.empty_like(packed) for _ in ranks] if receives else None
    dist.gather(packed, parts, dst=0, group=group)
    if parts is None:
        return
    for tensor in bucket:
        whole[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
    for rank, part in enumerate(parts):
        for tensor, piece in zip(bucket, part.cpu().split(sizes), strict=True):
            start, shape = _chunk_shape(tensor, mesh_dim, rank)
            content = piece.view(tensor.dtype)[: torch.Size(shape).numel()].view(shape)
            dim = tensor.placements[mesh_dim].dim  # type: ignore[attr-defined]
            whole[id(tensor)].narrow(dim, start, shape[dim]).copy_(content)


def _whole(value: Any, gathered: Mapping[int, Tensor]) -> Any:
    return map_tensors(value, lambda t: gathered[id(t)] if isinstance(t, DTensor) else t.detach().cpu())


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


# What goes into a checkpoint ----------------------------------------------------------------------------------------


def sharded_state(module: nn.Module) -> dict[str, Any]:
    """The model's state dict with this rank's DTensors. A collective call."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(module)


def load_sharded_state(module: nn.Module, state: dict[str, Any]) -> None:
    """The inverse of :func:`sharded_state`; what ``state`` lacks stays as it is. A collective call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, state, options=StateDictOptions(strict=False))


def model_state(module: nn.Module, *, full: bool) -> dict[str, Any]:
    """The model's state dict. A collective call.

    Args:
        module: Sharded or not.
        full: Whole tensors on rank 0 and nothing on the others, instead of this rank's DTensors.
    """
    state = sharded_state(module)
    if not full:
        return state
    gathered = gather(_tensors(state))
    return _whole(state, gathered) if dist.get_rank() == 0 else {}


def optimizer_state(module: nn.Module, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
    """The optimizer's state dict as the ordinary FSDP2 run writes it. A collective call; changes no value.

    Unlike ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, which steps an optimizer without state
    on zero gradients.

    Args:
        module: The model.
        optimizer: Its optimizer, or one of them.
        full: Whole tensors on rank 0 (nothing on the others), parameters by their position in ``module.parameters()``
            and sorted; instead of this rank's DTensors, parameters by name and in the order of the groups.
    """
    sharding.reshard(module)
    names = parameter_names(module)
    saved = optimizer.state_dict()
    # Lightning's re-keying (`FSDP.rekey_optim_state_dict`) leaves names where there is no state, as of SGD.
    numbered = full and bool(saved["state"])
    positions = {key: position for position, key in enumerate(names)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys: list[Any] = [positions[id(param)] if numbered else names[id(param)] for param in params]
    groups = []
    for group in saved["param_groups"]:
        members = [keys[index] for index in group["params"]]
        groups.append({**group, "params": sorted(members) if numbered else members})
    known = range(len(keys))
    state = {keys[index] if index in known else index: entry for index, entry in saved["state"].items()}
    if not full:
        return {"state": state, "param_groups": groups}
    gathered = gather(_tensors(state))
    if dist.get_rank() != 0:
        return {}
    return {"state": _whole(state, gathered), "param_groups": _whole(groups, {})}


# Whole tensors as shards --------------------------------------------------------------------------------------------


def placed_like(value: Tensor, target: Tensor) -> Tensor:
    """A copy of a whole tensor, placed as ``target`` is: this rank's shard of it where that is a DTensor.

    Args:
        value: Whole, on any device; the same on every rank.
        target: A parameter, a buffer or a state. Where the shapes differ, the value is replicated (a tensor with a
            single element stays a plain tensor, which DTensors take as replicated).
    """
    if not isinstance(target, DTensor) or value.ndim == 0:
        return value.detach().clone()
    mesh = target.device_mesh
    placements = target.placements if value.shape == target.shape else [Replicate()] * mesh.ndim
    placed = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)  # `None`: no communication
    # The shard may be a view that keeps the whole tensor alive.
    local = local_tensor(placed).to(target.device, copy=True)
    if value.shape == target.shape:
        return shard_like(local, target)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=placed.stride())


def empty_like(value: Tensor, target: Tensor) -> Tensor:
    """Memory for a saved tensor of which only shape and dtype are known (a tensor on ``meta``), placed as above."""
    if not isinstance(target, DTensor):
        return torch.empty_like(value, device="cpu" if value.ndim == 0 else target.device)
    if value.ndim == 0:
        return torch.empty_like(value, device="cpu")
    if value.shape == target.shape:
        return shard_like(torch.empty_like(local_tensor(target), dtype=value.dtype), target)
    local = torch.empty_like(value, device=target.device)
    return DTensor.from_local(local, target.device_mesh, [Replicate()] * target.device_mesh.ndim, run_check=False)
