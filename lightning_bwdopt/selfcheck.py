"""Whether an optimizer gives the same result when its parameters are stepped one by one."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt.views import StepView, same_class

# Read in their source: each parameter's update depends on that parameter, its gradient, its state and its group alone.
SEPARABLE_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
_PROBE_STEPS = 40
_OF_PARAMS = ("params", "param_names")  # entries of a group that are not hyperparameters


def check_optimizer(optimizer: Optimizer, *, probe: bool = True) -> None:
    """Refuses an optimizer that cannot step its parameters one by one.

    Args:
        optimizer: The optimizer; nothing of it is changed.
        probe: Also step an unknown class jointly and through views on small random tensors, and compare.

    Raises:
        ValueError: with the reason.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"`{name}` needs a closure: it evaluates the loss several times per step, and in the backward pass each"
            " parameter steps once. Use another optimizer, or train it with the mode off (`enabled=False`)."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"`{name}(differentiable=True)` keeps the graph of every step, which needs all gradients to stay. Pass"
            " `differentiable=False`, or train it with the mode off (`enabled=False`)."
        )
    if probe and type(optimizer) not in SEPARABLE_OPTIMIZERS and (reason := _probe(optimizer)):
        raise ValueError(
            f"`{name}` {reason}, so stepping each parameter in the backward pass would not give the ordinary result."
            " Use another optimizer, train with the mode off (`enabled=False`), or pass `self_check=False` to accept"
            " another result."
        )


def _probe(optimizer: Optimizer) -> str | None:
    """Steps copies jointly and through views on small tensors; why the results differ, or ``None``."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return "wraps another optimizer, which steps all of its parameters at once"
    # At the user's rate a coupling can hide behind rounding; at 1.0 the estimates of adaptive classes move.
    for rate in (None, 1.0):
        with torch.random.fork_rng(devices=[]):
            try:
                joint, draws = _run(optimizer, rate, split=False)
            except Exception as error:
                return f"fails on small random tensors (`{type(error).__name__}: {error}`) and cannot be probed"
            try:
                split, _ = _run(optimizer, rate, split=True)
            except Exception as error:
                return f"fails when it steps one parameter at a time (`{type(error).__name__}: {error}`)"
        if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(joint, split, strict=True)):
            return "draws random numbers in order" if draws else "couples parameters in its step"
    return None


def _run(optimizer: Optimizer, rate: float | None, *, split: bool) -> tuple[list[Tensor], bool]:
    """Some steps with drifting gradients on copies; the parameters and state tensors, and whether it drew numbers."""
    groups = [_small_group(group, rate) for group in optimizer.param_groups[:4]]
    params = [p for group in groups for p in group["params"]]
    trial = _trial(optimizer, groups)
    written: dict[tuple[int, str], Any] = {}
    views = [StepView(trial, [p], written, {}) for p in reversed(params)] if split else []
    noise = torch.Generator().manual_seed(0)
    draws = False
    for step in range(_PROBE_STEPS):
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=noise) * (1 + number) + 0.1 * step
            param.grad = gradient.to(param.device, param.dtype)
        torch.manual_seed(step)
        before = torch.get_rng_state()
        if split:
            for view in views:
                view.step()
            for (index, key), value in written.items():
                trial.param_groups[index][key] = value
            written.clear()
        else:
            trial.step()
        draws |= not torch.equal(before, torch.get_rng_state())
    tensors = [value for p in params for value in trial.state[p].values() if isinstance(value, Tensor)]
    return [t.detach() for t in (*params, *tensors)], draws


def _trial(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer like this one, without state, for other parameters."""
    trial = same_class(optimizer, groups)
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "step") and not key.startswith("_optimizer_"):
            setattr(trial, key, copy.deepcopy(value))
    trial.state = defaultdict(dict)
    if callable(switch := getattr(trial, "train", None)):  # schedule-free optimizers step in this mode only
        switch()
    return trial


def _small_group(group: dict[str, Any], rate: float | None) -> dict[str, Any]:
    """A group with the same hyperparameters and four small parameters of the same kinds."""
    small = {key: copy.deepcopy(value) for key, value in group.items() if key not in _OF_PARAMS}
    if rate is not None and "lr" in small:
        small["lr"] = torch.full_like(small["lr"], rate) if isinstance(small["lr"], Tensor) else rate
    kinds = [group["params"][i % len(group["params"])] for i in range(4)] if group["params"] else []
    noise = torch.Generator().manual_seed(1)
    small["params"] = [_small_param(p, noise, longer_by=i) for i, p in enumerate(kinds)]
    return small


def _small_param(like: Tensor, noise: torch.Generator, longer_by: int = 0) -> Tensor:
    """A small parameter with as many dimensions, on the same device and of the same dtype."""
    shape = [(4, 3, 2, 2, 2)[dim] + (longer_by if dim == 0 else 0) for dim in range(like.ndim)]
    return torch.randn(shape, generator=noise).to(like.device, like.dtype).requires_grad_()


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
        params.append([_small_param(kind, torch.Generator().manual_seed(0)) for kind in kinds.values()])
        settings = {key: copy.deepcopy(value) for key, value in {**own, **group}.items() if key not in _OF_PARAMS}
        small.append({**settings, "params": params[-1]})
    trial = _trial(optimizer, small)
    with torch.random.fork_rng(devices=[]):
        try:
            for param in (p for members in params for p in members):
                param.grad = torch.ones_like(param)
            trial.step()
        except Exception:
            return None
    return {
        (index, param.ndim): {
            key: isinstance(value, Tensor) and value.shape == param.shape for key, value in trial.state[param].items()
        }
        for index, members in enumerate(params)
        for param in members
    }
