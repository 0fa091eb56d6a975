"""The backward pass of a loss for all the optimizers that it reaches, or the two passes that clipping by norm takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bwdopt import refusals

if TYPE_CHECKING:
    from lightning_bwdopt.optimizer import OptimizerInBackward, Phase


def run_backward(cores: Sequence[OptimizerInBackward], loss: Tensor, run: Callable[..., Any] | None = None) -> bool:
    """Runs the backward pass or passes of one loss for all the optimizers that it reaches.

    Clipping by norm takes two passes over the same graph. The first only sums the squared norms and drops the
    gradients; one reduction gives the global norm; the second steps with the clip coefficient.

    Args:
        cores: The attached optimizers.
        loss: A 0-d tensor with a graph.
        run: Runs one pass; is called with ``retain_graph=True`` when another follows. ``None``: ``loss.backward``.

    Returns:
        Whether the parameters moved (or their gradients are held): ``False`` for a skipped step.

    Raises:
        FloatingPointError: the loss or a gradient is not finite, and that is an error or others have moved already.
    """
    run = loss.backward if run is None else run
    cores = [core for core in cores if core.reachable]
    action = next((core.treatment.on_nonfinite for core in cores if core.treatment.on_nonfinite != "ignore"), "ignore")
    if action != "ignore" and (bad := _nonfinite_ranks(loss, distributed=any(core.distributed for core in cores))):
        stepped = sum(core.stepped for core in cores)
        if action == "error" or stepped:
            raise refusals.nonfinite_loss(loss.item(), bad, cores[0].steps, stepped)
        for core in cores:
            core.leave_out_step()
    left_out = [core for core in cores if core.leaves_out_step]
    stepping = [core for core in cores if not core.leaves_out_step]
    with _phases(left_out, "drop"):
        if any(core.treatment.clips_norm and not core.holds for core in stepping):
            moved = _run_clipping(stepping, run)
        else:
            run()  # also when nothing steps: FSDP's own state is only in order again after a backward pass
            moved = True
    return _leave_out(left_out) if left_out else moved


def _run_clipping(cores: Sequence[OptimizerInBackward], run: Callable[..., Any]) -> bool:
    stepping = [core for core in cores if not core.holds]
    if any(core.has_held_gradients for core in cores):
        # The norm is that of the sum over the micro-batches, known only when the last of them has been added.
        with _phases(stepping, "hold"):
            run()
        if not all(core.treat_held() for core in stepping):
            return _leave_out(cores)
        for core in stepping:
            core.step_held()
            core.count_backward()
        return True
    clipping = [core for core in stepping if core.treatment.clips_norm]
    try:
        with _phases(cores, "drop"), _phases(clipping, "measure"):
            run(retain_graph=True)
        for core in clipping:
            core.treatment.prepare_clipping()
        if not all(core.finds_finite() for core in clipping):
            return _leave_out(cores)
        run()
        return True
    except RuntimeError as error:
        refusals.check_second_pass(error)
        raise
    finally:
        for core in clipping:
            core.treatment.forget()


def _leave_out(cores: Sequence[OptimizerInBackward]) -> bool:
    """Leaves out the step of these; where its end is that of its last backward pass, that is now."""
    for core in cores:
        core.leave_out_step()
        if not (core.calls_step or core.holds):
            core.end_step()
    return False


def _phases(cores: Sequence[OptimizerInBackward], phase: Phase) -> ExitStack:
    stack = ExitStack()
    for core in cores:
        stack.enter_context(core.in_phase(phase))
    return stack


def _nonfinite_ranks(loss: Tensor, *, distributed: bool) -> list[int]:
    """The ranks on which the loss is not finite; the same list on every rank."""
    bad = (~torch.isfinite(loss.detach())).any().to(torch.int32)
    if not distributed:
        return [0] if bad.item() else []
    flags = bad.new_zeros(dist.get_world_size())
    flags[dist.get_rank()] = bad
    dist.all_reduce(flags)
    return flags.nonzero().flatten().tolist()
