"""Optimizers that are older than the sharding: they hold parameters that have been replaced since."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_bwdopt.states import clean_name


def remember_names(module: nn.Module) -> WeakIdKeyDictionary:
    """The names of a module's plain parameters, without keeping the parameters alive."""
    names = WeakIdKeyDictionary()
    for name, param in module.named_parameters():
        # Of what is split already: a weak reference would keep `Module.to` from converting a DTensor.
        if not isinstance(param, DTensor):
            names[param] = clean_name(name)
    return names


def remap_optimizers(optimizers: Iterable[Optimizer], module: nn.Module, names: WeakIdKeyDictionary) -> None:
    """Gives optimizers the parameters that `fully_shard` or `parallelize_module` has put in place, by name.

    ``LightningCLI`` builds a top-level ``optimizer:`` before the Trainer exists.

    Args:
        optimizers: Changed in place; one that holds the module's own parameters stays as it is.
        module: The sharded module.
        names: What :func:`remember_names` returned before.
    """
    current = {clean_name(name): param for name, param in module.named_parameters()}
    alive = {id(p) for p in current.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p if id(p) in alive else current.get(names.get(p, ""), p) for p in group["params"]]
