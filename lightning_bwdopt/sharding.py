"""Which modules become units, and the sharding of them with FSDP2's `fully_shard`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FSDPModule, fully_shard

WrapPolicy = Collection[type[nn.Module]] | Callable[..., bool]


def find_blocks(root: nn.Module, policy: WrapPolicy | None = None) -> list[nn.Module]:
    """The modules inside ``root`` that become a unit each.

    Args:
        root: Any module.
        policy: Module classes; or a callable that takes a module and returns whether it is a block (a callable with a
            ``recurse`` argument is called as FSDP's own wrap policies are); ``None``: what the model names itself
            (``_no_split_modules`` of ``transformers``), and the children of every ``ModuleList`` or ``Sequential``
            that has at least two, all of one class and with parameters. Outermost match first.

    Returns:
        Blocks in the order of ``root.modules()``, without those that share a parameter with the rest of the model:
        tied weights must stay in one unit.

    Raises:
        ValueError: a policy that matches nothing.
    """
    is_block = _as_predicate(root, policy)
    blocks = list(_outermost(root, is_block)) if policy is None else [m for m in root.modules() if is_block(m)]
    blocks = [block for block in blocks if block is not root and any(True for _ in block.parameters())]
    if policy is not None and not blocks:
        classes = sorted({type(m).__name__ for m in root.modules() if m is not root})
        raise ValueError(
            f"`auto_wrap_policy={policy!r}` matches no module of `{type(root).__name__}`, so nothing would be sharded"
            f" block by block. Name one of its classes ({', '.join(classes)}), or pass `None` to have blocks found."
        )
    return [block for block in blocks if not _shares_parameters(root, block)]


def _as_predicate(root: nn.Module, policy: WrapPolicy | None) -> Callable[[nn.Module], bool]:
    if policy is None:
        repeated = {id(child) for module in root.modules() if _is_repeated(module) for child in module.children()}
        named = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        return lambda module: id(module) in repeated or type(module).__name__ in named
    if not callable(policy):
        classes = tuple(policy)
        for entry in classes:
            if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
                raise TypeError(
                    f"`auto_wrap_policy` has the entry `{entry!r}`, which is not a module class. Name classes, as in"
                    " `{torch.nn.TransformerEncoderLayer}`."
                )
        return lambda module: isinstance(module, classes)
    if "recurse" in inspect.signature(policy).parameters:  # torch.distributed.fsdp.wrap's protocol
        return lambda module: bool(
            policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters()))
        )
    return lambda module: bool(policy(module))


def _is_repeated(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children) >= 2
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.parameters()) for child in children)
    )


def _outermost(module: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_block(child):
            yield child
        else:
            yield from _outermost(child, is_block)


def _shares_parameters(root: nn.Module, block: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    own = {id(p) for p in block.parameters()}
    return any(
        id(p) in own for module in root.modules() if id(module) not in inside for p in module.parameters(recurse=False)
    )


def shard(root: nn.Module, blocks: Iterable[nn.Module], *, root_reshards: bool = False, **options: Any) -> None:
    """Applies ``fully_shard`` to each block, innermost first, then to ``root`` for what remains.

    Args:
        root: The module to shard, in place. Its ``Parameter`` objects are replaced by sharded ones.
        blocks: Modules inside it.
        root_reshards: Free the root's own parameters after forward, too. FSDP2 keeps them by default, since backward
            needs them first.
        **options: ``mesh``, ``reshard_after_forward``, ``mp_policy``, ``offload_policy`` of ``fully_shard``.

    Raises:
        ValueError: a 0-d parameter, which FSDP2 cannot shard.
    """
    if scalars := [name for name, p in root.named_parameters() if p.ndim == 0]:
        raise ValueError(
            f"The parameter `{scalars[0]}` is 0-dimensional, which `fully_shard` cannot split over ranks. Declare it"
            " with one element, `nn.Parameter(torch.zeros(1))`, and use it as before: it broadcasts."
        )
    for block in reversed(list(blocks)):
        fully_shard(block, **options)
    fully_shard(root, **{**options, "reshard_after_forward": options["reshard_after_forward"] and root_reshards})


def called_children(module: nn.Module) -> list[nn.Module]:
    """The children with parameters that are called, looking through containers that cannot be."""
    children: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            children += called_children(child)
        elif any(True for _ in child.parameters()):
            children.append(child)
    return children


def checkpoint_activations(root: nn.Module, classes: Collection[type[nn.Module]]) -> None:
    """Recomputes the activations of modules of these classes in backward (non-reentrant; names stay as they are).

    Raises:
        ValueError: no module is of these classes.
    """
    modules = [module for module in root.modules() if isinstance(module, tuple(classes))]
    if not modules:
        raise ValueError(
            f"`activation_checkpointing_policy={classes!r}` matches no module of `{type(root).__name__}`, so no"
            " activation would be recomputed. Name the classes of its blocks, or leave the argument out."
        )
    for module in modules:
        checkpoint(module)


def class_name(module: nn.Module) -> str:
    """The name of the user's class: ``fully_shard`` makes a subclass called ``FSDP…`` of it."""
    kind = type(module)
    return next(base.__name__ for base in kind.__mro__ if not issubclass(base, FSDPModule))


def is_sharded(root: nn.Module) -> bool:
    """Whether ``fully_shard`` has been applied to the module or to one inside it."""
    return any(isinstance(module, FSDPModule) for module in root.modules())


def units_of(root: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[list[Tensor]]:
    """The parameters that step together: each FSDP module's own; without FSDP each block's, then each other module's.

    A parameter is in the first unit that has it, innermost modules first.
    """
    if is_sharded(root):
        owners = [module for module in reversed(list(root.modules())) if isinstance(module, FSDPModule)]
        return _partition(owner.parameters() for owner in owners)
    modules = [block.parameters() for block in blocks]
    return _partition([*modules, *(module.parameters(recurse=False) for module in root.modules())])


def _partition(candidates: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    seen: set[int] = set()
    units: list[list[Tensor]] = []
    for params in candidates:
        unit = [p for p in params if id(p) not in seen]
        seen.update(map(id, unit))
        if unit:
            units.append(unit)
    return units


def meta_parameters(root: nn.Module) -> list[str]:
    """Names of parameters and buffers that have no data."""
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return [name for name, tensor in tensors if tensor.device == torch.device("meta")]
