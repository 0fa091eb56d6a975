"""The optimizer in the backward pass: step each unit of parameters as soon as its gradients are final.

The mechanism, in the order in which it happens:

1. `OptimizerInBackward.attach` puts one post-accumulate-grad hook on every trainable parameter.
2. A hook counts its gradient as arrived in the parameter's `_Unit`.
3. When the last awaited gradient of the unit is there, the unit's view steps and the gradients are dropped. A view
   (`views.py`) is an optimizer of the user's class that works on the real optimizer's state and hyperparameters.
4. What is incomplete when backward ends (unused or frozen parameters) is stepped by an end-of-backward callback.
5. The real optimizer's `step` finds nothing left to do. It ends the step: a parameter may be stepped again. In a loop
   that never calls it each backward is a step.

The real optimizer stays the only one that schedulers, loggers and checkpoints see. What a step does to its groups is
kept in `attached.py` until the step ends. What happens to a gradient on its way to the step is in `clipping.py`; a loss
that several optimizers share, or that takes two passes, in `passes.py`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_bwdopt import refusals
from lightning_bwdopt.arguments import NonFinite, check_flag, unit_lists
from lightning_bwdopt.attached import AttachedOptimizer
from lightning_bwdopt.clipping import GradientTreatment
from lightning_bwdopt.passes import run_backward
from lightning_bwdopt.selfcheck import SEPARABLE_OPTIMIZERS, RandomNumbers, check_optimizer
from lightning_bwdopt.views import StepView

if TYPE_CHECKING:
    from typing_extensions import Self

# What the hooks do with the gradients of a unit: step and drop them; leave them for a later micro-batch or `step()`;
# add them to the gradient norm and drop them; drop them.
Phase = Literal["step", "hold", "measure", "drop"]
UnitStepHook = Callable[[Sequence[Tensor]], None]


class _Unit:
    """Parameters that step together."""

    def __init__(self, core: OptimizerInBackward, params: Sequence[Tensor]) -> None:
        self._core = core
        self.params = params
        self.view = StepView(core.optimizer, params, core.real.written, core.real.used)
        self.awaited = 0  # how many are trainable
        self.arrived: set[int] = set()  # ids of those whose gradient waits for the others'
        self.done: set[int] = set()  # ids of those stepped since the last step boundary

    def arrive(self, param: Tensor) -> None:
        """The post-accumulate-grad hook of each of the unit's parameters."""
        core = self._core
        holds = core._phase == "hold"
        # Asked here, too: this runs for every parameter, and a call costs as much as the rest.
        if not holds and (core._pass is None or core._pass() is None):
            core._watch_end_of_backward()
        key = id(param)
        if key in self.done:
            raise refusals.second_gradient(core._describe(param))
        if holds:
            return
        self.arrived.add(key)
        if len(self.arrived) + len(self.done) >= self.awaited:
            core._process(self)

    @property
    def has_gradient(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def with_gradient(self) -> list[Tensor]:
        return [p for p in self.params if p.grad is not None]

    def step(self) -> None:
        """Steps the parameters that have a gradient, and drops it."""
        core = self._core
        for before, _ in core._unit_step_hooks.values():
            before(self.params)
        draws = RandomNumbers(self.params[0].device) if core._watches_draws else None
        self.arrived.clear()
        try:
            for param in self.view.step():
                param.grad = None
                self.done.add(id(param))
        except BaseException:  # Ctrl-C, too
            self.done.update(map(id, self.params))  # any of them may have moved
            raise
        if draws is not None and draws.drawn():
            raise refusals.drawn_numbers(core.optimizer)
        for _, after in core._unit_step_hooks.values():
            after(self.params)

    def drop(self) -> None:
        self.arrived.clear()
        for param in self.params:
            param.grad = None


class OptimizerInBackward:
    """Steps an optimizer inside the backward pass, unit by unit, and drops each gradient once it is used.

    Call :meth:`attach` (or enter the object as a context manager), then train as always: ``loss.backward()`` steps the
    parameters. The loop may keep its ``optimizer.step()`` and ``optimizer.zero_grad()`` lines; in a loop that never
    calls ``step()`` each backward is a step. :meth:`remove` makes ``optimizer`` an ordinary optimizer again. The state
    dict is the optimizer's own and interchanges with an ordinary run's.

    Args:
        optimizer: The real optimizer. It keeps the state and the parameter groups; schedulers and checkpoints use it.
        units: Lists of parameters that step together, for example those of one transformer block. Parameters of the
            optimizer that no list names are a unit each. ``None``: every parameter by itself.
        clip: ``("norm", max_norm)`` or ``("value", clip_value)``: exact gradient clipping. By norm, call
            :meth:`backward` instead of ``loss.backward()``: it runs two backward passes.
        grad_norm: Compute :attr:`grad_norm` in every backward.
        on_nonfinite: What :meth:`backward` does on a loss that is NaN or infinite on any rank: ``"ignore"``,
            ``"error"``, or ``"skip"``: no parameter and no state moves on any rank. Both also look at every gradient:
            clipping by norm knows them all before the first step and treats them as it treats the loss; otherwise
            they are an error at the end of backward.
        self_check: Probe an optimizer class that is not known to be separable, and refuse it where stepping its
            parameters one by one changes the result.

    Raises:
        TypeError: ``optimizer`` is not a :class:`torch.optim.Optimizer`, or an option has a value of a wrong type.
        ValueError: an option is invalid, or the optimizer cannot step its parameters one by one.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with OptimizerInBackward(optimizer, units=[list(block.parameters()) for block in model]):
            for batch in batches:
                model(batch).sum().backward()  # steps

    Note:
        Gradients are gone when ``backward`` returns; a hook of your own on a parameter must read ``param.grad`` in the
        hook. Two backward calls that reach the same parameter before one ``step()`` raise: sum the losses. Backward is
        the step: no ``zero_grad()`` takes it back, no second ``step()`` repeats it, and setting a hyperparameter
        between the two is an error. A parameter that backward does not reach is not stepped, also where
        ``zero_grad(set_to_none=False)`` would have left a zero for it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Iterable[Iterable[Tensor]] | None = None,
        *,
        clip: tuple[str, float] | None = None,
        grad_norm: bool = False,
        on_nonfinite: NonFinite = "ignore",
        self_check: bool = True,
    ) -> None:
        if not (isinstance(optimizer, Optimizer) and hasattr(optimizer, "param_groups")):
            raise refusals.not_an_optimizer(optimizer)
        check_flag("grad_norm", grad_norm)
        check_flag("self_check", self_check)
        check_optimizer(optimizer, probe=self_check)
        self.optimizer = optimizer
        self.treatment = GradientTreatment(clip, grad_norm, on_nonfinite)
        self.real = AttachedOptimizer(optimizer)
        self._watches_draws = self_check and type(optimizer) not in SEPARABLE_OPTIMIZERS
        self.parameter_names: Mapping[int, str] = {}  # id(parameter) -> name, for messages
        self.steps = 0  # how many steps have ended, for messages
        self.leaves_out_step = False  # `on_nonfinite="skip"` drops every gradient until the step ends
        self.calls_step = False  # the loop calls `optimizer.step()`, so that ends a step; otherwise backward's end
        self._wanted_units = unit_lists(units)
        self._units: list[_Unit] = []
        self._unit_of: dict[int, _Unit] = {}
        self._layout: list[list[int]] = []  # ids of the parameters in each group that the units were built for
        self._trainable: list[bool] = []  # which of them required a gradient when the hooks were made
        self._hooks: dict[int, Any] = {}  # id(parameter) -> handle
        self._unit_step_hooks: OrderedDict[int, tuple[UnitStepHook, UnitStepHook]] = OrderedDict()
        self._phase: Phase = "step"
        self._pass: weakref.ref | None = None  # the callback queued to the backward pass under way, while that lives
        self._backwards_without_step = 0

    # Attaching ------------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return self.real.taken

    def attach(self, *, calls_step: bool = False) -> Self:
        """Hooks every trainable parameter. When attached already, picks up parameters unfrozen or added since.

        Args:
            calls_step: The loop is known to call ``optimizer.step()`` once per step. Otherwise this is learned from
                the first such call.

        Returns:
            The object itself.

        Raises:
            ValueError: no parameter of the optimizer is trainable, one is attached elsewhere, or ``step`` was replaced.
            TypeError: the parameters are wrapped in DDP or FSDP1.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        refusals.check_step_pre_hooks(self.optimizer)
        layout, trainable = self.real.layout(), [p.requires_grad for p in params]
        self.calls_step |= calls_step
        if self.attached and layout == self._layout and trainable == self._trainable:
            return self  # the strategies ask before every batch
        refusals.check_hooked_parameters((p for p in params if id(p) not in self._hooks), _Unit)
        if not self.attached:
            if not any(p.requires_grad for p in params):
                raise refusals.nothing_trainable(self.optimizer)
            refusals.check_wrapped_parameters(params)
            self.real.take_over(self._step, self._before_loading)
            self._forget_pass()
            self.calls_step = calls_step
            self._backwards_without_step = 0
            self.steps = 0
        if self._layout != layout:
            self._build_units(params)
        self._layout, self._trainable = layout, trainable
        for param in params:
            if param.requires_grad and id(param) not in self._hooks:
                hook = self._unit_of[id(param)].arrive
                self._hooks[id(param)] = param.register_post_accumulate_grad_hook(hook)
        for unit in self._units:
            unit.awaited = sum(p.requires_grad for p in unit.params)
        return self

    def remove(self) -> None:
        """Takes every hook off and gives the optimizer its own ``step`` back. Does nothing when not attached."""
        if not self.attached:
            return
        self.end_step()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._units.clear()
        self._unit_of.clear()
        self._layout.clear()
        self.real.give_back()

    def __getstate__(self) -> dict[str, Any]:
        # The hooks belong to these very parameters, so a copy of an attached one is not attached.
        detached: dict[str, Any] = {
            "_units": [],
            "_unit_of": {},
            "_layout": [],
            "_hooks": {},
            "_unit_step_hooks": OrderedDict(),
            "_pass": None,
            "parameter_names": {},
        }
        return {**vars(self), **detached, "real": AttachedOptimizer(self.optimizer)}

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _build_units(self, params: Sequence[Tensor]) -> None:
        done = {key for unit in self._units for key in unit.done}
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        remaining = {id(p): p for p in params}
        wanted = [[remaining.pop(id(p)) for p in unit if id(p) in remaining] for unit in self._wanted_units or ()]
        wanted += [[param] for param in remaining.values()]
        self._units = [_Unit(self, unit) for unit in wanted if unit]
        self._unit_of = {id(p): unit for unit in self._units for p in unit.params}
        for key in done & self._unit_of.keys():
            self._unit_of[key].done.add(key)

    # One step -------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, run: Callable[..., Any] | None = None) -> bool:
        """Runs the backward pass of ``loss``, or the two passes that clipping by norm takes.

        Args:
            loss: A 0-d tensor with a graph.
            run: Runs one pass; is called with ``retain_graph=True`` when another follows. ``None``: ``loss.backward``.

        Returns:
            Whether the parameters moved (or their gradients are held): ``False`` for a step that
            ``on_nonfinite="skip"`` left out. Step a scheduler only after a step.

        Raises:
            FloatingPointError: the loss or a gradient is not finite and ``on_nonfinite="error"``.
        """
        return run_backward([self], loss, run)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Holds the gradients of every backward inside: for each micro-batch of a step but the last."""
        with self.in_phase("hold"):
            yield

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Runs what is inside with the hooks in another phase."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @property
    def holds(self) -> bool:
        """Whether the hooks leave the gradients alone at this moment."""
        return self._phase == "hold"

    @property
    def has_held_gradients(self) -> bool:
        """Whether a parameter has a gradient: outside of backward, one of an earlier micro-batch."""
        return any(unit.has_gradient for unit in self._units)

    @property
    def reachable(self) -> bool:
        """Whether a backward can reach a parameter: Lightning's `toggle_optimizer` freezes those of the others."""
        return any(p.requires_grad for unit in self._units for p in unit.params)

    @property
    def distributed(self) -> bool:
        """Whether parameters are sharded or replicated over ranks, so that all of them step together."""
        return any(isinstance(p, DTensor) for unit in self._units for p in unit.params)

    def _watch_end_of_backward(self) -> None:
        """At the first gradient of a backward pass: has `_end_backward` called at its end."""
        if self._pass is not None and self._pass() is not None:
            return  # this pass has it; or a pass around this one (reentrant checkpointing), at whose end it is time
        if self._pass is not None:
            self.treatment.forget()
            for unit in self._units:
                unit.arrived.clear()
            if self.stepped:
                raise refusals.failed_pass(self.stepped)
        if self._layout != self.real.layout():
            raise refusals.changed_groups(self.optimizer)
        callback = self._end_of_graph
        self.real.notice_cleared_state()
        self._pass = weakref.ref(callback)  # autograd holds the callback as long as the pass lives, also if it fails
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end_of_graph(self) -> None:
        # Each FSDP root reduces what its modules left in a callback of its own, queued when backward reached the root:
        # by now all of them are queued, and this goes behind them.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _process(self, unit: _Unit) -> None:
        """A unit's gradients are final: does with them what the phase says."""
        if self._phase == "step":
            if self.treatment.active:
                self.treatment.apply(unit.with_gradient())
            unit.step()
            return
        if self._phase == "measure":
            self.treatment.measure(unit.with_gradient())
        unit.drop()

    def _end_backward(self) -> None:
        """Runs last in a backward pass: steps what is still incomplete."""
        if torch._C._current_autograd_node() is not None:
            raise refusals.unseen_outer_pass()
        for unit in self._units:
            if unit.arrived or (len(unit.done) < len(unit.params) and unit.has_gradient):
                self._process(unit)
        self._pass = None
        if self._phase == "step":
            self.end_of_gradients()

    def end_of_gradients(self) -> None:
        """The gradients of a backward have been stepped, and those that were looked at are known."""
        self.treatment.end_backward()
        bad, step, moved = self.nonfinite_gradient(), self.steps, self.stepped
        self.count_backward()
        if bad is not None:
            raise refusals.nonfinite_gradient(bad, step, moved)

    def count_backward(self) -> None:
        """A backward has stepped; in a loop that does not call ``step()`` that is a step."""
        if self.calls_step:
            return
        self._backwards_without_step += 1
        self.end_step()
        if self._backwards_without_step > 1 and self.optimizer._optimizer_step_post_hooks:
            raise refusals.post_hook_without_step(self.optimizer)

    def nonfinite_gradient(self) -> str | None:
        """The first parameter with a gradient that was not finite on any rank, in words."""
        params = [p for unit in self._units for p in unit.params]
        bad = self.treatment.take_nonfinite(params, distributed=self.distributed)
        return None if bad is None else self._describe(bad)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The real optimizer's ``step`` while attached: runs the closure, steps what it left, ends the step."""
        refusals.check_step_pre_hooks(self.optimizer)
        result = None
        if closure is not None:
            self.calls_step = True
            with torch.enable_grad():
                result = closure()
        if changed := self.real.changed_since_used():
            raise refusals.changed_after_backward(self.optimizer, *changed)
        if self.has_held_gradients:
            if self.treat_held():
                self.step_held()
        elif self._backwards_without_step and not self.calls_step and self._pass is None:
            if self._backwards_without_step > 1:
                raise refusals.step_after_backwards(self._backwards_without_step)
            self.calls_step = True
        self.end_step()
        return result

    def treat_held(self) -> bool:
        """Clips gradients that are all there; ``False``: they are not finite, and are dropped."""
        if not self.treatment.active:
            return True
        self.treatment.apply_to_held([p for unit in self._units for p in unit.with_gradient()])
        return self.finds_finite()

    def finds_finite(self) -> bool:
        """Whether all gradients were finite, of which none has been used; drops them where the step is left out."""
        bad = self.nonfinite_gradient()
        if bad is None:
            return True
        if self.treatment.on_nonfinite == "error" or self.stepped:
            raise refusals.nonfinite_gradient(bad, self.steps, self.stepped)
        self.leave_out_step()
        return False

    def step_held(self) -> None:
        """Steps, through the views, every parameter that has a gradient; all of them are there."""
        self.real.notice_cleared_state()
        for unit in self._units:
            if unit.has_gradient:
                unit.step()

    def leave_out_step(self) -> None:
        """Drops the gradients that are held, and those that still come until the step ends."""
        self.leaves_out_step = True
        for unit in self._units:
            unit.drop()

    def end_step(self) -> None:
        """The step boundary: from here on a parameter may be stepped again."""
        self.real.end_step()
        if self.stepped:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless they see it
        if self.stepped or self.leaves_out_step:
            self.steps += 1
        self.leaves_out_step = False
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass = None
        self.treatment.forget()
        for unit in self._units:
            unit.arrived.clear()
            unit.done.clear()

    def _before_loading(self) -> None:
        if self.stepped and self._pass is None:  # after a pass that failed a checkpoint is just what is needed
            raise refusals.loading_before_step(self.stepped)
        self._forget_pass()

    # What can be asked ----------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """Global L2 norm of the last backward's gradients before clipping, over all ranks, or ``None``.

        0-d; float32, or float64 for float64 gradients.
        """
        return self.treatment.norm

    @property
    def stepped(self) -> int:
        """How many parameters have been stepped since the last step boundary."""
        return sum(len(unit.done) for unit in self._units)

    @property
    def used_groups(self) -> list[dict[str, Any]]:
        """For each parameter group, the hyperparameters that its last step really used; ``{}`` before the first."""
        return self.real.used_groups

    def register_unit_step_hooks(self, before: UnitStepHook, after: UnitStepHook) -> RemovableHandle:
        """Watches the steps inside backward, as :meth:`torch.optim.Optimizer.register_step_post_hook` does the whole.

        Args:
            before: Called with the unit's parameters when they are about to step; their gradients are final.
            after: Called with them when they have stepped and the gradients are gone.

        Returns:
            A handle whose ``remove()`` takes both off.
        """
        handle = RemovableHandle(self._unit_step_hooks)
        self._unit_step_hooks[handle.id] = before, after
        return handle

    def state_dict(self) -> dict[str, Any]:
        """The real optimizer's state dict: keys, order and values of an ordinary run."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of an ordinary run into the real optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def _describe(self, param: Tensor) -> str:
        name = self.parameter_names.get(id(param))
        return f"parameter `{name}`" if name else f"a parameter of shape `{tuple(param.shape)}`"
