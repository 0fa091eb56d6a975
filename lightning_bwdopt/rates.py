"""The learning rates of an optimizer."""

from __future__ import annotations

from typing import Any

from lightning_bwdopt.optimizer import OptimizerInBackward


def get_lr(optimizer: Any) -> list[float]:
    """The learning rate of each parameter group, in the groups' order.

    Args:
        optimizer: A :class:`torch.optim.Optimizer`, Lightning's wrapper of one, or an
            :class:`~lightning_bwdopt.OptimizerInBackward`.

    Returns:
        One float per group; rates that differ between groups are all returned.

    Raises:
        TypeError: ``optimizer`` has no parameter groups.
        ValueError: a group has no ``lr``.
    """
    if isinstance(optimizer, OptimizerInBackward):
        optimizer = optimizer.optimizer
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(
            f"`{type(optimizer).__name__}` has no `param_groups`, so it has no learning rate. Pass the optimizer itself"
            " (`trainer.optimizers[0]`)."
        )
    for index, group in enumerate(groups):
        if "lr" not in group:
            raise ValueError(
                f"Parameter group {index} of `{type(optimizer).__name__}` has no `lr`, only {sorted(group)}. Read the"
                " entry that this optimizer uses from `optimizer.param_groups` instead."
            )
    return [float(group["lr"]) for group in groups]
