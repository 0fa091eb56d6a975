"""The real optimizer while its parameters are stepped in backward: what is put on it, entered in it, and undone."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt import refusals
from lightning_bwdopt.views import ATTRIBUTES


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
        self.used: dict[int, dict[str, Any]] = {}  # group index -> the group as its last step read it
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
        self._ordered_states = len(self.optimizer.state)

    def notice_cleared_state(self) -> None:
        """Called before a step: the user may have removed entries, which the step then makes anew."""
        self._ordered_states = min(self._ordered_states, len(self.optimizer.state))

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
        return [
            {key: value for key, value in self.used.get(index, {}).items() if key != "params"}
            for index in range(len(self.optimizer.param_groups))
        ]


def _make_step(run: Callable[[Callable[[], Any] | None], Any]) -> Callable[..., Any]:
    # The decorator is torch's own for `step`: it runs the user's step hooks, once a step.
    @Optimizer.profile_hook_step
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return run(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later need not wrap it
    return step
