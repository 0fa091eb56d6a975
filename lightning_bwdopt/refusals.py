"""What the core cannot do: one function a case, each with the value found, the reason and the remedy.

A function named for a fault returns the error to raise; one named `check_...` looks for the fault and raises.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Set-up -----------------------------------------------------------------------------------------------------------


def not_an_optimizer(optimizer: object) -> TypeError:
    """Something else in the optimizer's place; a wrapper that only looks like one, too."""
    return TypeError(
        f"`optimizer` is a `{type(optimizer).__name__}` and not a `torch.optim.Optimizer` with state and groups of its"
        " own to step through. Pass the optimizer that your loop or `configure_optimizers` built."
    )


def needs_closure(optimizer: Optimizer) -> ValueError:
    """A class that evaluates the loss itself."""
    return ValueError(
        f"`{type(optimizer).__name__}` needs a closure: it evaluates the loss several times per step, and in the"
        " backward pass each parameter steps once. Use another optimizer, or train it with the mode off"
        " (`enabled=False`)."
    )


def not_separable(optimizer: Optimizer, reason: str) -> ValueError:
    """A class whose result would change."""
    return ValueError(
        f"`{type(optimizer).__name__}` {reason}, so stepping each parameter in the backward pass would not give the"
        " ordinary result. Use another optimizer, train with the mode off (`enabled=False`), or pass"
        " `self_check=False` to accept another result."
    )


def differentiable(optimizer: Optimizer) -> ValueError:
    """A step that is to be differentiated itself."""
    return ValueError(
        f"`{type(optimizer).__name__}(differentiable=True)` keeps the graph of every step, which needs all gradients to"
        " stay. Pass `differentiable=False`, or train it with the mode off (`enabled=False`)."
    )


def drawn_numbers(optimizer: Optimizer) -> RuntimeError:
    """A class that the self-check did not see draw."""
    return RuntimeError(
        f"`{type(optimizer).__name__}` has drawn random numbers in its step, which come in the order of backward and"
        " not in that of an ordinary step. Use another optimizer, train with the mode off (`enabled=False`), or pass"
        " `self_check=False` to accept another result."
    )


def nothing_trainable(optimizer: Optimizer) -> ValueError:
    """An optimizer in which everything is frozen."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return ValueError(
        f"`{type(optimizer).__name__}` holds {count} parameters and none requires a gradient, so no backward can step"
        " it. Unfreeze some, or build the optimizer from the trainable ones."
    )


def check_replaced_step(optimizer: Optimizer, step: Any) -> None:
    """A ``step`` on the instance, unless it is the one by which schedulers see that it is called."""
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"`step` of this `{type(optimizer).__name__}` was replaced by `{step!r}`, which stepping in the backward"
            " pass would bypass. Attach before compiling or wrapping `step`, or leave `step` as it is."
        )


def check_step_pre_hooks(optimizer: Optimizer) -> None:
    """Pre-hooks of ``step`` look at gradients, or change them."""
    if optimizer._optimizer_step_pre_hooks:
        raise ValueError(
            f"`{type(optimizer).__name__}` has a `step` pre-hook, which would find the parameters stepped and the"
            " gradients gone. Use a post-hook, or read the gradients in `register_post_accumulate_grad_hook` on the"
            " parameters."
        )


def check_wrapped_parameters(params: Iterable[Tensor]) -> None:
    """Parameters whose gradients belong to DDP or FSDP1, which reduce them in buffers of their own."""
    params = list(params)
    # `_fsdp_flattened` is how FSDP1 itself (torch.distributed.fsdp._common_utils) knows its parameters.
    wrapper = "FullyShardedDataParallel" if any(getattr(p, "_fsdp_flattened", False) for p in params) else None
    plain = {id(p) for p in params if not isinstance(p, DTensor)}
    if wrapper is None and plain and dist.is_available() and dist.is_initialized():
        # DDP leaves no mark on a parameter, its hooks are in C++: look for the wrapper itself.
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel) and any(id(p) in plain for p in thing.parameters()):
                wrapper = type(thing).__name__
    if wrapper:
        raise TypeError(
            f"Parameters of this optimizer are wrapped in `{wrapper}`, which reduces gradients over the ranks after the"
            " hooks have stepped: the ranks would drift apart. Shard the bare module with"
            " `torch.distributed.fsdp.fully_shard` before building the optimizer."
        )


def check_hooked_parameters(params: Iterable[Tensor], unit: type) -> None:
    """Parameters that a ``unit`` of another core steps; each gradient can be used once."""
    for param in params:
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            if isinstance(getattr(hook, "__self__", None), unit):
                raise ValueError(
                    f"A parameter of shape `{tuple(param.shape)}` is stepped by another `OptimizerInBackward`, which"
                    " drops its gradient. Give each parameter to one optimizer, or `remove()` the other one first."
                )


# In a loop --------------------------------------------------------------------------------------------------------


def second_gradient(param: str) -> RuntimeError:
    """A gradient for a parameter that has been stepped in this step."""
    return RuntimeError(
        f"A second gradient arrived for {param}, which was stepped with the first one since the last `step()`; stepping"
        " it twice would not be the ordinary run. Sum the losses and call backward once, or hold the earlier gradients"
        " (`accumulate_grad_batches`, `OptimizerInBackward.accumulate()`). Reentrant activation checkpointing of a"
        " module that is used twice has this effect too: pass `use_reentrant=False`."
    )


def changed_groups(optimizer: Optimizer) -> RuntimeError:
    """Parameters added to, removed from or moved between the groups."""
    return RuntimeError(
        f"The parameters in the groups of this `{type(optimizer).__name__}` are not those that were there at"
        " `attach()`. Call `attach()` again after `add_param_group` and other changes of the groups."
    )


def changed_after_backward(optimizer: Optimizer, index: int, key: str, used: Any, now: Any) -> RuntimeError:
    """A hyperparameter that was set between backward, which has stepped, and ``step()``."""
    return RuntimeError(
        f"`{key}` of parameter group {index} of this `{type(optimizer).__name__}` was set to `{now}` after backward,"
        f" which has stepped with `{used}` already. Set it before backward, or after `step()` for the next one."
    )


def unseen_outer_pass() -> RuntimeError:
    """The first gradients came from a pass inside another one, whose end the hooks cannot be told of."""
    return RuntimeError(
        "A backward pass inside another one (reentrant activation checkpointing) gave the first gradients, so that the"
        " end of the outer one cannot be seen. Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`."
    )


def failed_pass(stepped: int) -> RuntimeError:
    """A backward after one that raised when parameters had moved."""
    return RuntimeError(
        f"The backward pass before this one failed after it had stepped {stepped} parameters, so that the model is"
        " between two steps; the ordinary run would not have moved it. Load a checkpoint, or call `optimizer.step()` to"
        " go on from here all the same."
    )


def step_after_backwards(count: int) -> RuntimeError:
    """``step()`` in a loop in which several backward calls have been steps."""
    return RuntimeError(
        f"`step()` was called after {count} backward calls, and each of them has stepped the parameters. Call `step()`"
        " after every backward or never; sum the losses that belong to one step, or wrap every micro-batch of a step"
        " but the last in `OptimizerInBackward.accumulate()`."
    )


def post_hook_without_step(optimizer: Optimizer) -> RuntimeError:
    """Post-hooks run in ``step()``, which this loop does not call."""
    return RuntimeError(
        f"`{type(optimizer).__name__}` has a `step` post-hook, which runs in `optimizer.step()`, and a second backward"
        " came without that call. Call `optimizer.step()` after each backward."
    )


def loading_before_step(stepped: int) -> RuntimeError:
    """``load_state_dict`` when this step's parameters have moved by the old state."""
    return RuntimeError(
        f"`load_state_dict` came between backward, which has stepped {stepped} parameters, and `optimizer.step()`; the"
        " ordinary run would step with the loaded state. Load after `step()`."
    )


# What is not finite -----------------------------------------------------------------------------------------------


def nonfinite_loss(value: float, ranks: list[int], step: int, moved: int) -> FloatingPointError:
    """A loss that is NaN or infinite; ``moved`` parameters were stepped by an earlier loss of the step."""
    return FloatingPointError(
        f"In step {step} the loss is not finite on rank(s) {', '.join(map(str, ranks))} (`{value}` on this one)."
        + (f" {moved} parameters have moved by another loss of this step." if moved else " No parameter has moved.")
        + ' Look at this batch and the learning rate, or pass `on_nonfinite="skip"` to leave such steps out.'
    )


def nonfinite_gradient(param: str, step: int, moved: int) -> FloatingPointError:
    """A gradient with NaN or infinite elements."""
    return FloatingPointError(
        f"In step {step} the gradient of {param} has NaN or infinite elements. "
        + (
            "Parameters have moved by such gradients: only clipping by norm (`clip=('norm', …)`,"
            " `gradient_clipping='exact'`) looks at all of them before the first one moves."
            if moved
            else "No parameter has moved in this step."
        )
        + " Look at this batch and the learning rate, and for the operation that overflows."
    )


# Clipping ---------------------------------------------------------------------------------------------------------


def unmeasured_clipping(limit: float) -> RuntimeError:
    """``loss.backward()`` where two passes are needed."""
    return RuntimeError(
        f"`clip=('norm', {limit})` needs the norm of all gradients before the first one is used, which"
        " `loss.backward()` cannot give. Call `OptimizerInBackward.backward(loss)` instead."
    )


def check_second_pass(error: RuntimeError) -> None:
    """What autograd says when a graph cannot be walked twice."""
    text = str(error)
    if "donated buffer" in text:
        raise RuntimeError(
            "Clipping by norm walks the graph twice, and this compiled model gives its buffers away in the first pass"
            " (donated buffers). Set `torch._functorch.config.donated_buffer = False` before `torch.compile`."
        ) from error
    if "backward through the graph a second time" in text:
        raise RuntimeError(
            "Clipping by norm walks the graph twice, and the first pass has freed it. An override of `backward` (or"
            " the `run` argument) must pass `retain_graph=True` on to `loss.backward`; it is called with it."
        ) from error
