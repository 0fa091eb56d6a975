"""Which modules become units, and the sharding of them with FSDP2's `fully_shard`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from lightning_bwdopt.policies import WrapPolicy, picked


def find_blocks(root: nn.Module, policy: WrapPolicy | None = None) -> list[nn.Module]:
    """The modules inside ``root`` that become a unit each.

    Args:
        root: Any module.
        policy: Module classes; or a callable that takes a module and returns whether it is a block; or one of FSDP1's
            policies (``torch.distributed.fsdp.wrap``); ``None``: what the model names itself (``_no_split_modules`` of
            ``transformers``), and the children of every ``ModuleList`` or ``Sequential`` that has at least two, all of
            one class and with parameters. Outermost match first.

    Returns:
        Blocks in the order of ``root.modules()``, without those that share a parameter with the rest of the model:
        tied weights must stay in one unit. A container that cannot be called is never a block.

    Raises:
        TypeError: an entry that is no module class.
        ValueError: a policy that matches nothing.
    """
    matches = _automatic(root) if policy is None else picked(root, policy, "auto_wrap_policy")
    wanted = {id(module) for module in matches if module is not root and _can_be_unit(module)}
    blocks = [module for module in root.modules() if id(module) in wanted]
    if policy is not None and not blocks:
        classes = sorted({type(m).__name__ for m in root.modules() if m is not root})
        raise ValueError(
            f"`auto_wrap_policy={policy!r}` matches no module of `{type(root).__name__}`, so nothing would be sharded"
            f" block by block. Name one of its classes ({', '.join(classes)}), or pass `None` to have blocks found."
        )
    return [block for block in blocks if not _shares_parameters(root, block)]


def _can_be_unit(module: nn.Module) -> bool:
    return not _is_container(module) and _has_parameters(module)


def _is_container(module: nn.Module) -> bool:
    """Whether nothing calls the module: FSDP2 gathers parameters in a module's forward, which it does not have."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _automatic(root: nn.Module) -> Iterator[nn.Module]:
    repeated = {id(child) for module in root.modules() if _is_repeated(module) for child in module.children()}
    named = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return _outermost(root, lambda module: id(module) in repeated or type(module).__name__ in named)


def _is_repeated(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children) >= 2
        and len({type(child) for child in children}) == 1
        and all(map(_can_be_unit, children))
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


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    root_reshards: bool = False,
    root_steps: bool = False,
    **options: Any,
) -> None:
    """Applies ``fully_shard`` to each block, innermost first, then to ``root`` for what remains.

    Args:
        root: The module to shard, in place. Its ``Parameter`` objects are replaced by sharded ones.
        blocks: Modules inside it.
        root_reshards: Free the root's own parameters after forward, too. FSDP2 keeps them by default, since backward
            needs them first.
        root_steps: The root's forward is a whole step with its loss: cast at its children (:func:`cast_at_children`).
        **options: ``mesh``, ``reshard_after_forward``, ``mp_policy``, ``offload_policy`` of ``fully_shard``.

    Raises:
        ValueError: a parameter that FSDP2 cannot shard: 0-d, or trainable and without elements.
    """
    if scalars := [name for name, p in root.named_parameters() if p.ndim == 0]:
        raise ValueError(
            f"The parameter `{scalars[0]}` is 0-dimensional, which `fully_shard` cannot split over ranks. Declare it"
            " with one element, `nn.Parameter(torch.zeros(1))`, and use it as before: it broadcasts."
        )
    if empty := [name for name, p in root.named_parameters() if p.numel() == 0 and p.requires_grad]:
        raise ValueError(
            f"The parameter `{empty[0]}` has no elements, and FSDP2 cannot reduce its gradient. Leave it out of the"
            " model, or freeze it with `requires_grad_(False)`."
        )
    for block in reversed(list(blocks)):
        fully_shard(block, **options)
    if isinstance(policy := options.get("mp_policy"), MixedPrecisionPolicy) and root_steps:
        options["mp_policy"] = cast_at_children(root, policy)
    fully_shard(root, **{**options, "reshard_after_forward": options["reshard_after_forward"] and root_reshards})


def cast_at_children(module: nn.Module, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Moves the casts of a policy from a LightningModule to its children that are called.

    ``fully_shard`` casts what goes into a module and what comes out. Around a whole ``training_step`` that would round
    the targets too, and compute the loss in the parameters' dtype before casting it.

    Returns:
        The policy for the module itself.
    """
    for child in called_children(module):
        if isinstance(child, FSDPModule):
            continue  # casts by itself
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            cast_inputs = partial(_cast_inputs, dtype=policy.param_dtype)
            child.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        if policy.output_dtype is not None:
            child.register_forward_hook(partial(_cast_outputs, dtype=policy.output_dtype))
    return dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)


def _cast_inputs(_: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> Any:
    return _cast((args, kwargs), dtype)


def _cast_outputs(_: nn.Module, args: Any, output: Any, *, dtype: torch.dtype) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def called_children(module: nn.Module) -> list[nn.Module]:
    """The children with parameters that are called, looking through containers that cannot be."""
    children: list[nn.Module] = []
    for child in module.children():
        if _is_container(child):
            children += called_children(child)
        elif _has_parameters(child):
            children.append(child)
    return children


def checkpoint_activations(root: nn.Module, policy: WrapPolicy) -> None:
    """Recomputes the activations of some modules in backward (non-reentrant; names stay as they are).

    Args:
        root: Any module.
        policy: Which of the modules inside it, as in :func:`find_blocks`.

    Raises:
        TypeError: an entry that is no module class.
        ValueError: a policy that matches nothing.
    """
    matches = picked(root, policy, "activation_checkpointing_policy")
    modules = [module for module in matches if module is not root]
    if not modules:
        raise ValueError(
            f"`activation_checkpointing_policy={policy!r}` matches no module of `{type(root).__name__}`, so no"
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


def reshard(root: nn.Module) -> None:
    """Puts the sharded parameters in place: after an evaluation forward the root still has its gathered ones there."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
