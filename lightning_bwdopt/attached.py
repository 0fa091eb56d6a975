"""The real optimizer while its parameters are stepped in backward: what is put on it, entered in it, and undone."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt import refusals
from lightning_bwdopt.views import ATTRIBUTES, OWN_ENTRIES


class AttachedOptimizer:
    """Replaces an optimizer's ``step``, and keeps its groups and state as ordinary steps would leave them.

    Some optimizers count in their groups (schedule-free: ``k``, ``weight_sum``) or in attributes. All views of one step
    must read the same value, as in an ordinary step, so what they change waits in :attr:`written` until :meth:`settle`.

    Args:
        optimizer: The real optimizer; nothing happens to it before :meth:`take_over`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.written: dict[tuple[int, str], Any] = {}  # (group index, key) -> value, as in `StepView`
        self.used: dict[int, dict[str, Any]] = {}  # group index -> the group as this step has read it
        self._last_used: dict[int, dict[str, Any]] = {}  # likewise, as the last step before it that used the group did
        self._ordered_states = 0  # how many entries of the state are in their final order
        self._handles: list[Any] = []
        self._own_step: Any = None  # the `step` that a scheduler has put on the instance

    @property
    def taken(self) -> bool:
        """Whether ``step`` is replaced."""
        return bool(self._handles)

    def take_over(self, step: Callable[[Callable[[], Any] | None], Any], before_loading: Callable[[], None]) -> None:
        """Has ``optimizer.step`` call ``step``, and ``load_state_dict`` first ``before_loading``."""
        optimizer = self.optimizer
        own = vars(optimizer).get("step")
        refusals.check_replaced_step(optimizer, own)
        self._own_step = own
        optimizer.step = MethodType(_make_step(step), optimizer)  # type: ignore[method-assign]
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: before_loading()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._forget()),
        ]
        self._forget()

    def give_back(self) -> None:
        """Undoes :meth:`take_over`."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        del self.optimizer.step
        if self._own_step is not None:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]

    def layout(self) -> list[list[int]]:
        """The ids of the parameters in each group."""
        return [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def _forget(self) -> None:
        self.written.clear()
        self.used.clear()
        self._ordered_states = len(self.optimizer.state)

    def notice_cleared_state(self) -> None:
        """Called before a step: the user may have removed entries, which the step then makes anew."""
        self._ordered_states = min(self._ordered_states, len(self.optimizer.state))

    def changed_since_used(self) -> tuple[int, str, Any, Any] | None:
        """A hyperparameter that this step has used with another value than it has now: group, key, used, now."""
        for index, group in enumerate(self.optimizer.param_groups):
            for key, before in self.used.get(index, {}).items():
                if key in OWN_ENTRIES or key not in group or (index, key) in self.written:
                    continue
                if before is not group[key] and not _equal(before, group[key]):
                    return index, key, before, group[key]
        return None

    def end_step(self) -> None:
        """What was used is that of the last step; what comes next is another."""
        self.settle()
        self._last_used.update(self.used)
        self.used.clear()

    def settle(self) -> None:
        """Enters what the views have changed in the groups, and orders the state."""
        optimizer = self.optimizer
        for (index, key), value in self.written.items():
            if index == ATTRIBUTES:
                setattr(optimizer, key, value)
                continue
            group = optimizer.param_groups[index]
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # the step has changed it in place, on a copy
            else:
                group[key] = value
        self.written.clear()
        if len(optimizer.state) != self._ordered_states:
            # Backward met the parameters last to first; an ordinary step adds their states in the groups' order.
            new = dict(list(optimizer.state.items())[self._ordered_states :])
            for param in new:
                del optimizer.state[param]
            ordered = {p: new.pop(p) for group in optimizer.param_groups for p in group["params"] if p in new}
            optimizer.state.update(ordered | new)
            self._ordered_states = len(optimizer.state)

    @property
    def used_groups(self) -> list[dict[str, Any]]:
        """For each group the hyperparameters that its last step really used; ``{}`` before the first."""
        used = {**self._last_used, **self.used}
        return [
            {key: value for key, value in used.get(index, {}).items() if key != "params"}
            for index in range(len(self.optimizer.param_groups))
        ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def _make_step(run: Callable[[Callable[[], Any] | None], Any]) -> Callable[..., Any]:
    # The decorator is torch's own for `step`: it runs the user's step hooks, once a step.
    @Optimizer.profile_hook_step
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return run(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later need not wrap it
    return step
