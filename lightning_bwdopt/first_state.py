"""What an optimizer keeps for a parameter after its first step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt.trials import OF_PARAMS, like, undisturbed
from lightning_bwdopt.views import without_hooks


def first_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, bool]] | None:
    """What a first step keeps for a parameter, learned from a step of small tensors.

    Args:
        optimizer: Nothing of it is changed.
        groups: Hyperparameters to use in place of the groups' own, one dict for each group.

    Returns:
        ``(index of the group, dimensions of the parameter) -> {key: whether the value has the parameter's shape}``;
        ``None`` where the optimizer does not step small tensors.
    """
    params: list[list[Tensor]] = []
    small: list[dict[str, Any]] = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        kinds = {p.ndim: p for p in own["params"]}
        # Sides of different lengths tell a value of the parameter's shape from one row or column of it.
        params.append(
            [
                torch.zeros(
                    [3 + side for side in range(ndim)], dtype=kind.dtype, device=kind.device, requires_grad=True
                )
                for ndim, kind in kinds.items()
            ]
        )
        settings = {key: copy.deepcopy(value) for key, value in {**own, **group}.items() if key not in OF_PARAMS}
        small.append({**settings, "params": params[-1]})
    trial = like(optimizer, small)
    with undisturbed(optimizer):
        try:
            for param in (p for members in params for p in members):
                param.grad = torch.ones_like(param)
            without_hooks(type(trial).step)(trial)
        except Exception:
            return None
    return {
        (index, param.ndim): {
            key: isinstance(value, Tensor) and value.shape == param.shape for key, value in trial.state[param].items()
        }
        for index, members in enumerate(params)
        for param in members
    }
