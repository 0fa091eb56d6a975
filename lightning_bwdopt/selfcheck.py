"""Whether an optimizer gives the same result when its parameters are stepped one by one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt import refusals
from lightning_bwdopt.attached import AttachedOptimizer
from lightning_bwdopt.trials import OF_PARAMS, like, undisturbed
from lightning_bwdopt.views import ELEMENTWISE_OPTIMIZERS, StepView, without_hooks

# Read in their source: each parameter's update depends on that parameter, its gradient, its state and its group alone.
SEPARABLE_OPTIMIZERS: frozenset[type[Optimizer]] = ELEMENTWISE_OPTIMIZERS | {
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
}
# (learning rate, longest side of the first tensor, steps). At the user's rate a coupling can hide behind rounding; at
# 1.0 the estimates of adaptive classes move: `DAdaptAdaGrad` shows itself in step 17. Some draw random numbers, or
# quantize, for larger matrices only. The number of steps does not depend on the time: all ranks must agree.
_PROBES: tuple[tuple[float | None, int, int], ...] = ((None, 64, 2), (None, 4, 5), (1.0, 4, 40))


def check_optimizer(optimizer: Optimizer, *, probe: bool = True) -> None:
    """Refuses an optimizer that cannot step its parameters one by one.

    Args:
        optimizer: The optimizer; nothing of it is changed.
        probe: Also step an unknown class jointly and through views on small random tensors, and compare.

    Raises:
        ValueError: with the reason.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise refusals.needs_closure(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise refusals.differentiable(optimizer)
    if probe and type(optimizer) not in SEPARABLE_OPTIMIZERS and (reason := _probe(optimizer)):
        raise refusals.not_separable(optimizer, reason)


def _probe(optimizer: Optimizer) -> str | None:
    """Steps copies jointly and through views on small tensors; why the results differ, or ``None``."""
    for value in vars(optimizer).values():
        if any(isinstance(part, Optimizer) for part in (value if isinstance(value, list | tuple) else (value,))):
            return "wraps another optimizer, which steps all of its parameters at once"
    with undisturbed(optimizer):
        for rate, size, steps in _PROBES:
            if reason := _compare(optimizer, rate, size, steps):
                return reason
    return None


def _compare(optimizer: Optimizer, rate: float | None, size: int, steps: int) -> str | None:
    try:
        joint, split = _Trial(optimizer, rate, size), _Trial(optimizer, rate, size)
    except Exception as error:
        return f"cannot be copied for a probe on small tensors (`{type(error).__name__}: {error}`)"
    views = [StepView(split.optimizer, [p], split.real.written, {}) for p in reversed(split.params)]
    noise = torch.Generator().manual_seed(0)
    for step in range(steps):
        for number, (one, other) in enumerate(zip(joint.params, split.params, strict=True)):
            gradient = torch.randn(one.shape, generator=noise) * (1 + number) + 0.1 * step  # drifts
            one.grad = gradient.to(one.device, one.dtype)
            other.grad = one.grad.clone()
        draws = RandomNumbers(joint.params[0].device)
        try:
            without_hooks(type(joint.optimizer).step)(joint.optimizer)
        except Exception as error:
            needs = "needs a closure and" if "closure" in str(error).lower() else ""
            return f"{needs} fails on small random tensors (`{type(error).__name__}: {error}`)".strip()
        if draws.drawn():
            return "draws random numbers, in the order of the parameters"
        try:
            for view in views:
                view.step()
        except Exception as error:
            return f"fails when it steps one parameter at a time (`{type(error).__name__}: {error}`)"
        split.real.settle()
        if not _same(joint.results(), split.results()):
            return "couples parameters in its step"
    return None


class _Trial:
    """A copy of an optimizer on small parameters, with an empty state."""

    def __init__(self, optimizer: Optimizer, rate: float | None, size: int) -> None:
        noise = torch.Generator().manual_seed(1)
        memo: dict[int, Any] = {}  # what refers to a parameter refers to its small one in the copy
        groups = []
        for group in _kinds_of_groups(optimizer.param_groups):
            params = group["params"]
            kinds = [params[i % len(params)] for i in range(3 if len(optimizer.param_groups) == 1 else 2) if params]
            small = [_small(kind, 4 + i if i else size, noise) for i, kind in enumerate(kinds)]
            # Some classes take parameters of one shape together.
            small += [_small(like, max(like.shape, default=1), noise) for like in small[:2]]
            memo.update((id(p), small[i % len(small)]) for i, p in enumerate(params))
            rest = {key: value for key, value in group.items() if key not in OF_PARAMS}
            groups.append({"params": small, **copy.deepcopy(rest, memo)})
            if rate is not None and "lr" in group:
                groups[-1]["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
        self.params = [p for group in groups for p in group["params"]]
        self.optimizer = like(optimizer, groups, memo)
        self.real = AttachedOptimizer(self.optimizer)

    def results(self) -> list[Any]:
        """All that a step may have changed: parameters and their state, what the groups and attributes hold."""
        own = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        states = [list(self.optimizer.state[param].values()) for param in self.params]
        tensors = [[value for value in state if isinstance(value, Tensor)] for state in states]
        attributes = {key: value for key, value in vars(self.optimizer).items() if key != "state"}
        return [self.params, tensors, own, attributes]


def _kinds_of_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first groups, and the first of each kind: with other flags, or a zero where others have a number."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in groups:
        flags = {key: value for key, value in group.items() if key not in OF_PARAMS and not isinstance(value, Tensor)}
        kind = {key: value != 0 if isinstance(value, float) else value for key, value in flags.items()}
        kinds.setdefault(repr(kind), group)
    return [group for i, group in enumerate(groups) if i < 4 or any(group is first for first in kinds.values())]


def _small(param: Tensor, size: int, noise: torch.Generator) -> Tensor:
    """A random parameter of the same kind, no side longer than ``size``."""
    shape = [min(side, size) for side in param.shape]
    return torch.randn(shape, generator=noise).to(param.device, param.dtype).requires_grad_()


def _same(a: Any, b: Any) -> bool:
    """Whether numbers, flags, texts and tensors are the same, in nested lists and dicts; of other types, any are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return _same(list(a), list(b)) and _same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return not isinstance(a, int | float | str | None) or repr(a) == repr(b)


class RandomNumbers:
    """Notices that a random number was drawn since it was made.

    Args:
        device: Where, besides the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def drawn(self) -> bool:
        """Whether a state of the generators has changed."""
        return any(not torch.equal(a, b) for a, b in zip(self._before, self._states(), strict=True))

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states
