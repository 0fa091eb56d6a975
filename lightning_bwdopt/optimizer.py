"""The optimizer in the backward pass: step each unit of parameters as soon as its gradients are final.

The mechanism, in the order in which it happens:

1. `OptimizerInBackward.attach` puts one post-accumulate-grad hook on every trainable parameter.
2. A hook counts its gradient as arrived in the parameter's `_Unit`.
3. When the last awaited gradient of the unit is there, the unit's view steps and the gradients are dropped. A view
   (`views.py`) is an optimizer of the user's class that works on the real optimizer's state and hyperparameters.
4. What is incomplete when backward ends (unused or frozen parameters) is stepped by an end-of-backward callback.
5. The real optimizer's `step` finds nothing left to do. It ends the step: a parameter may be stepped again.

The real optimizer stays the only one that schedulers, loggers and checkpoints see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt.clipping import (
    NONFINITE_CHOICES,
    GradientTreatment,
    NonFinite,
    NonFiniteGradientError,
    parse_clip,
    run_backward,
)
from lightning_bwdopt.selfcheck import check_optimizer
from lightning_bwdopt.views import StepView

if TYPE_CHECKING:
    from typing_extensions import Self

# What the hooks do with the gradients of a unit: step and drop them; leave them for a later micro-batch or `step()`;
# add them to the gradient norm and drop them; drop them.
Phase = Literal["step", "hold", "measure", "drop"]

_NOT_REPLACED = object()


class _Unit:
    """Parameters that step together."""

    def __init__(self, core: OptimizerInBackward, params: Sequence[Tensor]) -> None:
        self._core = core
        self.params = params
        self.view = StepView(core.optimizer, params, core._written, core._used)
        self.awaited = 0  # trainable parameters
        self.arrived = 0  # gradients that wait for the others
        self.done: set[int] = set()  # ids of the parameters stepped since the last step boundary

    def arrive(self, param: Tensor) -> None:
        """The post-accumulate-grad hook of each of the unit's parameters."""
        core = self._core
        if core._phase == "hold":
            core.has_held_gradients = True
            return
        if id(param) in self.done:
            raise RuntimeError(core._second_gradient(param))
        core._watch_end_of_backward()
        self.arrived += 1
        if self.arrived + len(self.done) >= self.awaited:
            core._process(self)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def step(self) -> None:
        """Steps the parameters that have a gradient, and drops it."""
        self.view.step()
        self.arrived = 0
        for param in self.params:
            if param.grad is not None:
                param.grad = None
                self.done.add(id(param))

    def drop(self) -> None:
        self.arrived = 0
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
            ``"error"``, or ``"skip"`` (no parameter and no state moves on any rank).
        self_check: Probe an optimizer class that is not known to be separable, and refuse it where stepping its
            parameters one by one changes the result.

    Raises:
        TypeError: ``optimizer`` is not a :class:`torch.optim.Optimizer`.
        ValueError: an option is invalid, or the optimizer cannot step its parameters one by one.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with OptimizerInBackward(optimizer, units=[list(block.parameters()) for block in model]):
            for batch in batches:
                model(batch).sum().backward()  # steps

    Note:
        Gradients are gone when ``backward`` returns; a hook of your own on a parameter must read ``param.grad`` in the
        hook. Two backward calls that reach the same parameter before one ``step()`` raise: sum the losses.
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
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"`optimizer` is a `{type(optimizer).__name__}` and not a `torch.optim.Optimizer`, so it has no state"
                " and groups to step through. Pass the optimizer that your loop or `configure_optimizers` built."
            )
        if on_nonfinite not in NONFINITE_CHOICES:
            raise ValueError(
                f"`on_nonfinite={on_nonfinite!r}` is unknown. Choose one of {', '.join(map(repr, NONFINITE_CHOICES))}."
            )
        check_optimizer(optimizer, probe=self_check)
        self.optimizer = optimizer
        self.on_nonfinite = on_nonfinite
        self.treatment = GradientTreatment(parse_clip(clip), grad_norm, on_nonfinite)
        self.parameter_names: Mapping[int, str] = {}  # id(parameter) -> name, for messages
        self.has_held_gradients = False  # gradients of earlier micro-batches wait in `.grad`
        self._wanted_units = None if units is None else [list(unit) for unit in units]
        self._units: list[_Unit] = []
        self._unit_of: dict[int, _Unit] = {}
        self._hooks: dict[int, Any] = {}  # id(parameter) -> handle
        self._optimizer_hooks: list[Any] = []
        self._replaced_step: Any = _NOT_REPLACED
        self._phase: Phase = "step"
        self._written: dict[tuple[int, str], Any] = {}
        self._used: dict[int, dict[str, Any]] = {}
        self._ordered_states = 0  # how many entries of the optimizer's state are in their final order
        self._watched_task = -1  # the autograd graph task whose end `_end_backward` is queued for
        self._calls_step = False  # the loop calls `optimizer.step()`, so that ends a step; otherwise backward's end
        self._backwards_without_step = 0

    # Attaching ------------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return self._replaced_step is not _NOT_REPLACED

    def attach(self, *, calls_step: bool = False) -> Self:
        """Hooks every trainable parameter. When attached already, picks up parameters unfrozen or added since.

        Args:
            calls_step: The loop is known to call ``optimizer.step()`` once per step. Otherwise this is learned from
                the first such call.

        Returns:
            The object itself.

        Raises:
            ValueError: no parameter of the optimizer is trainable, or its ``step`` was replaced on the instance.
        """
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        if not self.attached:
            if not any(p.requires_grad for p in params):
                raise ValueError(
                    f"`{type(self.optimizer).__name__}` holds {len(params)} parameters and none requires a gradient, so"
                    " no backward can step it. Unfreeze some, or build the optimizer from the trainable ones."
                )
            self._take_over_step()
        self._calls_step |= calls_step
        if any(id(p) not in self._unit_of for p in params):
            self._build_units(params)
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
        self._end_step()
        for handle in (*self._hooks.values(), *self._optimizer_hooks):
            handle.remove()
        self._hooks.clear()
        self._optimizer_hooks.clear()
        self._units.clear()
        self._unit_of.clear()
        del self.optimizer.step
        if self._replaced_step is not None:
            self.optimizer.step = self._replaced_step  # type: ignore[method-assign]
        self._replaced_step = _NOT_REPLACED

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _build_units(self, params: Sequence[Tensor]) -> None:
        done = {key for unit in self._units for key in unit.done}
        remaining = {id(p): p for p in params}
        wanted = [[remaining.pop(id(p)) for p in unit if id(p) in remaining] for unit in self._wanted_units or ()]
        wanted += [[param] for param in remaining.values()]
        self._units = [_Unit(self, unit) for unit in wanted if unit]
        self._unit_of = {id(p): unit for unit in self._units for p in unit.params}
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for key in done & self._unit_of.keys():
            self._unit_of[key].done.add(key)

    def _take_over_step(self) -> None:
        optimizer = self.optimizer
        own = vars(optimizer).get("step")
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"`step` of this `{type(optimizer).__name__}` was replaced by `{own!r}`, which stepping in the backward"
                " pass would bypass. Attach before compiling or wrapping `step`, or leave `step` as it is."
            )
        self._replaced_step = own
        optimizer.step = MethodType(_make_step(self), optimizer)  # type: ignore[method-assign]
        self._optimizer_hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self._settle()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._forget()),
        ]
        self._forget()
        self._calls_step = False
        self._backwards_without_step = 0

    # One step -------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, run: Callable[..., Any] | None = None) -> bool:
        """Runs the backward pass of ``loss``, or the two passes that clipping by norm takes.

        Args:
            loss: A 0-d tensor with a graph.
            run: Runs one pass; is called with ``retain_graph=True`` when another follows. ``None``: ``loss.backward``.

        Returns:
            Whether the parameters moved (or their gradients are held): ``False`` for a step that
            ``on_nonfinite="skip"`` left out.

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

    def _watch_end_of_backward(self) -> None:
        # A mere flag would stay set after a backward pass that raised; the number of its graph task cannot.
        task = torch._C._current_graph_task_id()
        if task != self._watched_task:
            self._watched_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _process(self, unit: _Unit) -> None:
        """A unit's gradients are final: does with them what the phase says."""
        if self._phase == "step":
            if self.treatment.active:
                self._treat(unit.gradients())
            unit.step()
            return
        if self._phase == "measure":
            self.treatment.measure(unit.gradients())
        unit.drop()

    def _treat(self, gradients: Sequence[Tensor]) -> None:
        try:
            self.treatment.apply(gradients)
        except NonFiniteGradientError as error:
            bad = next(p for unit in self._units for p in unit.params if p.grad is error.gradient)
            raise FloatingPointError(
                f"The gradient of {self._describe(bad)} has NaN or infinite elements, and parameters that backward"
                " reached before it have moved. Lower the learning rate or look for the operation that overflows;"
                " exact clipping by norm checks every gradient before the first parameter moves."
            ) from None

    def _end_backward(self) -> None:
        """Queued to the autograd engine: steps what is still incomplete at the end of the backward pass."""
        self._watched_task = -1
        if torch._C._current_autograd_node() is not None:
            return  # the end of a pass inside another one (reentrant checkpointing), whose gradients may yet come
        for unit in self._units:
            if unit.arrived or (self.has_held_gradients and self._phase == "step" and unit.gradients()):
                self._process(unit)
        if self._phase == "step":
            self.has_held_gradients = False
            self.treatment.end_backward()
            if not self._calls_step:
                self._backwards_without_step += 1
                self._end_step()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The real optimizer's ``step`` while attached: runs the closure, steps what it left, ends the step."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if any(unit.gradients() for unit in self._units):
            self.optimizer_step_held()
        elif self._backwards_without_step:
            self._learn_that_loop_steps()
        self._end_step()
        return result

    def optimizer_step_held(self) -> None:
        """Steps, through the views, every parameter that has a gradient; all of them are there."""
        units = [unit for unit in self._units if unit.gradients()]
        if self.treatment.active:
            self.treatment.apply_to_held([p for unit in units for p in unit.params])
        for unit in units:
            unit.step()
        self.has_held_gradients = False

    def _learn_that_loop_steps(self) -> None:
        if not self._calls_step and self._backwards_without_step > 1:
            raise RuntimeError(
                f"`step()` was called after {self._backwards_without_step} backward calls, and each of them has stepped"
                " the parameters. Call `step()` after every backward or never; sum the losses that belong to one step,"
                " or wrap every micro-batch of a step but the last in `OptimizerInBackward.accumulate()`."
            )
        self._calls_step = True

    def _end_step(self) -> None:
        """The step boundary: from here on a parameter may be stepped again."""
        self._settle()
        if self.stepped:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless they see it
        for unit in self._units:
            unit.done.clear()

    def _forget(self) -> None:
        self._written.clear()
        self._ordered_states = len(self.optimizer.state)

    def _settle(self) -> None:
        """Leaves the real optimizer's groups and the order of its state as an ordinary step would."""
        optimizer = self.optimizer
        for (index, key), value in self._written.items():
            optimizer.param_groups[index][key] = value
        self._written.clear()
        if len(optimizer.state) != self._ordered_states:
            # Backward met the parameters last to first; an ordinary step adds their states in the groups' order.
            new = dict(list(optimizer.state.items())[self._ordered_states :])
            for param in new:
                del optimizer.state[param]
            ordered = {p: new.pop(p) for group in optimizer.param_groups for p in group["params"] if p in new}
            optimizer.state.update(ordered | new)
            self._ordered_states = len(optimizer.state)

    # What can be asked ----------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """Global L2 norm of the last backward's gradients before clipping, over all ranks: 0-d float32, or ``None``."""
        return self.treatment.norm

    @property
    def stepped(self) -> int:
        """How many parameters have been stepped since the last step boundary."""
        return sum(len(unit.done) for unit in self._units)

    @property
    def used_groups(self) -> list[dict[str, Any]]:
        """For each parameter group, the hyperparameters that its last step really used; ``{}`` before the first."""
        return [
            {key: value for key, value in self._used.get(index, {}).items() if key != "params"}
            for index in range(len(self.optimizer.param_groups))
        ]

    def state_dict(self) -> dict[str, Any]:
        """The real optimizer's state dict: keys, order and values of an ordinary run."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of an ordinary run into the real optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def _describe(self, param: Tensor) -> str:
        name = self.parameter_names.get(id(param))
        return f"parameter `{name}`" if name else f"a parameter of shape `{tuple(param.shape)}`"

    def _second_gradient(self, param: Tensor) -> str:
        return (
            f"A second gradient arrived for {self._describe(param)}, which was stepped with the first one since the"
            " last `step()`; stepping it twice would not be the ordinary run. Sum the losses and call backward once, or"
            " hold the earlier gradients (`accumulate_grad_batches`, `OptimizerInBackward.accumulate()`). Reentrant"
            " activation checkpointing of a module that is used twice has this effect too: pass `use_reentrant=False`."
        )


def _make_step(core: OptimizerInBackward) -> Callable[..., Any]:
    # The decorator is torch's own for `step`: it runs the user's step hooks, once a step.
    @Optimizer.profile_hook_step
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return core._step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later need not wrap it
    return step
