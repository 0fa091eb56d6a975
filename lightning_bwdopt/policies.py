"""Which modules a policy picks: a set of classes, a callable, or what FSDP1 takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, always_wrap_policy

WrapPolicy = Collection[type[nn.Module]] | Callable[..., bool] | CustomPolicy

_HOW_TO_NAME = (
    "Pass the classes themselves, as in `{torch.nn.TransformerEncoderLayer}`; a config has a list of their import"
    " paths, `[torch.nn.TransformerEncoderLayer]`."
)


def check_policy(argument: str, policy: Any) -> None:
    """A policy that names something else than module classes.

    Raises:
        TypeError: an entry that is no module class, or no collection at all.
    """
    if isinstance(policy, type):
        raise TypeError(
            f"`{argument}` is the class `{policy.__name__}`. Pass a set of classes, `{{{policy.__name__}}}`."
        )
    if policy is None or callable(policy) or isinstance(policy, CustomPolicy):
        return
    if isinstance(policy, str) or not isinstance(policy, Collection):
        raise TypeError(f"`{argument}={policy!r}` is neither a set of module classes nor a callable. {_HOW_TO_NAME}")
    for entry in policy:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"`{argument}` has the entry `{entry!r}`, which is not a module class. {_HOW_TO_NAME}")


def picked(root: nn.Module, policy: WrapPolicy, argument: str) -> list[nn.Module]:
    """The modules that a policy picks, ``root`` among them; ``argument`` is where the user passed it.

    Raises:
        TypeError: an entry that is no module class.
        ValueError: a policy with FSDP1's arguments for single modules.
    """
    check_policy(argument, policy)
    if isinstance(policy, CustomPolicy):
        # Its only interface, private in torch 2.13: a dict from the modules to wrap to FSDP1 arguments for each.
        chosen = policy._run_policy(root, ignored_modules=set(), root_kwargs={})
        if arguments := next((arguments for arguments in chosen.values() if arguments), None):
            raise ValueError(
                f"`{argument}` is a `CustomPolicy` that returns the FSDP1 arguments `{arguments!r}` for a module, and"
                " all modules that it picks are treated alike here. Return `True` instead, or do it yourself in"
                " `configure_model`."
            )
        return list(chosen)
    if not callable(policy):
        return [module for module in root.modules() if isinstance(module, tuple(policy))]
    if "recurse" in inspect.signature(policy).parameters or policy is always_wrap_policy:
        matches: list[nn.Module] = []
        _apply_fsdp1_policy(root, policy, matches)
        return matches
    return [module for module in root.modules() if policy(module)]


def _apply_fsdp1_policy(module: nn.Module, policy: Callable[..., bool], matches: list[nn.Module]) -> int:
    """Asks a policy as FSDP1 does, children first; how many elements of ``module`` are in a match."""
    total = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    wrapped = sum(_apply_fsdp1_policy(child, policy, matches) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
        return wrapped
    matches.append(module)
    return total
