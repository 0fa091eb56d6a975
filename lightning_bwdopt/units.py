"""The parameters that step together: each FSDP module's own, or on one device each block's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_bwdopt.sharding import class_name, is_sharded

# Without FSDP small neighbours make one unit, up to this share of the model and these bytes: a step of few small
# tensors is mostly overhead.
_JOINED_SHARE = 1 / 8
_JOINED_BYTES = 2 * 2**20


def named_units(root: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[tuple[str, list[Tensor]]]:
    """The parameters that step together: each FSDP module's own; without FSDP each block's, then each other module's.

    A parameter is in the first unit that has it, innermost modules first. Without FSDP small neighbours are joined.

    Returns:
        ``(class of the module, parameters)`` of each unit; parameters are whole tensors or DTensors.
    """
    seen: set[int] = set()
    if is_sharded(root):
        owners = [module for module in reversed(list(root.modules())) if isinstance(module, FSDPModule)]
        return _partition(((class_name(owner), owner.parameters()) for owner in owners), seen)
    limit = min(sum(map(_nbytes, root.parameters())) * _JOINED_SHARE, _JOINED_BYTES)
    inside = _partition(((class_name(block), block.parameters()) for block in blocks), seen)
    rest = ((class_name(module), module.parameters(recurse=False)) for module in root.modules())
    return [*_join_small(inside, limit), *_join_small(_partition(rest, seen), limit)]


def units_of(root: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[list[Tensor]]:
    """The parameters of each of :func:`named_units`."""
    return [params for _, params in named_units(root, blocks)]


def describe_units(units: Sequence[tuple[str, list[Tensor]]]) -> str:
    """The units with their sizes, equal ones together: ``3 units: 2 x Block (3.5 M parameters each), Head (0.1 M)``."""
    counts = Counter((name, sum(p.numel() for p in params)) for name, params in units)
    return f"{len(units)} unit{'s' * (len(units) != 1)}: " + ", ".join(
        f"{count} x {name} ({in_words(size)} parameters each)" if count > 1 else f"{name} ({in_words(size)})"
        for (name, size), count in counts.items()
    )


def in_words(number: int) -> str:
    """A number of parameters, such as ``3.5 M``; in full when it is small."""
    return f"{number / 1e6:.1f} M" if number >= 1e5 else str(number)


def _partition(candidates: Iterable[tuple[str, Iterable[Tensor]]], seen: set[int]) -> list[tuple[str, list[Tensor]]]:
    units: list[tuple[str, list[Tensor]]] = []
    for name, params in candidates:
        unit = [p for p in params if id(p) not in seen]
        seen.update(map(id, unit))
        if unit:
            units.append((name, unit))
    return units


def _join_small(units: Iterable[tuple[str, list[Tensor]]], limit: float) -> list[tuple[str, list[Tensor]]]:
    joined: list[tuple[str, list[Tensor]]] = []
    size = 0
    for name, unit in units:
        own = sum(map(_nbytes, unit))
        if joined and size + own <= limit:
            names, params = joined[-1]
            joined[-1] = (names if name in names.split(", ") else f"{names}, {name}", params + unit)
            size += own
        else:
            joined.append((name, unit))
            size = own
    return joined


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
