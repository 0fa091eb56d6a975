"""Between a gradient's arrival and its step: exact clipping, the gradient norm, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from lightning_bwdopt.views import local_tensor

if TYPE_CHECKING:
    from lightning_bwdopt.optimizer import OptimizerInBackward, Phase

NonFinite = Literal["ignore", "error", "skip"]
NONFINITE_CHOICES = ("ignore", "error", "skip")


class Clip(NamedTuple):
    """A parsed ``clip`` argument."""

    kind: Literal["norm", "value"]
    limit: float


def parse_clip(clip: tuple[str, float] | None) -> Clip | None:
    """Reads ``("norm", 1.0)`` or ``("value", 0.1)``.

    Raises:
        ValueError: another kind, or a limit that is not a positive finite number.
    """
    if clip is None:
        return None
    if not isinstance(clip, tuple | list) or len(clip) != 2 or clip[0] not in ("norm", "value"):
        raise ValueError(f"`clip={clip!r}` is unknown. Pass `('norm', max_norm)`, `('value', clip_value)` or `None`.")
    kind, limit = clip
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit) or limit <= 0:
        raise ValueError(
            f"`clip={clip!r}` has the limit `{limit!r}`, and only a positive finite number bounds a gradient. Pass"
            f" `('{kind}', 1.0)`, say, or `clip=None` for no clipping."
        )
    return Clip("norm" if kind == "norm" else "value", float(limit))


class GradientTreatment:
    """What is done with gradients on the way to their step, and what is learned from them.

    Args:
        clip: How to clip, if at all.
        grad_norm: Sum the norm of gradients even where clipping does not need it.
        on_nonfinite: With ``"error"`` or ``"skip"`` every gradient is looked at before it is used.
    """

    def __init__(self, clip: Clip | None, grad_norm: bool, on_nonfinite: str) -> None:
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        self.norm: Tensor | None = None
        self.clips_norm = clip is not None and clip.kind == "norm"
        self.sums_norm = grad_norm  # also where clipping does not need the norm
        self._sums: dict[DeviceMesh | None, Tensor] = {}
        self._coefficient: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether gradients must be looked at before they are used."""
        return self.sums_norm or self.clip is not None or self.on_nonfinite != "ignore"

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Looks at and clips, in place, gradients that are about to be used.

        Raises:
            NonFiniteGradientError: one of them has NaN or infinite elements and ``on_nonfinite`` forbids it.
            RuntimeError: clipping by norm, outside of :func:`run_backward`.
        """
        if self.on_nonfinite != "ignore":
            for gradient in gradients:
                if not torch.isfinite(local_tensor(gradient)).all():
                    raise NonFiniteGradientError(gradient)
        if self.sums_norm and not self.clips_norm:
            self.measure(gradients)
        if self.clip is None:
            return
        if self.clip.kind == "value":
            clip_by_value(gradients, self.clip.limit)
            return
        if self._coefficient is None:
            raise RuntimeError(
                f"`clip=('norm', {self.clip.limit})` needs the norm of all gradients before the first one is used,"
                " which `loss.backward()` cannot give. Call `OptimizerInBackward.backward(loss)` instead."
            )
        for local in map(local_tensor, gradients):
            local.mul_(self._coefficient.to(local.device, local.dtype))

    def measure(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to the norm: this rank's part, reduced over the ranks by :meth:`take_norm`."""
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for gradient in gradients:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
        for mesh, members in by_mesh.items():
            norms = torch._foreach_norm([local_tensor(g) for g in members], 2, dtype=torch.float32)
            squares = torch.stack(norms).square_()
            if any(_copies(g) != 1 for g in members):
                squares /= torch.tensor([_copies(g) for g in members], device=squares.device)
            total = squares.sum()
            self._sums[mesh] = self._sums[mesh] + total if mesh in self._sums else total

    def take_norm(self) -> Tensor:
        """Reduces the sums over their ranks, starts new ones, and keeps the result as :attr:`norm`."""
        total = torch.zeros(())
        for mesh, square in self._sums.items():
            if mesh is not None:
                square = DTensor.from_local(square, mesh, [Partial()] * mesh.ndim, run_check=False).full_tensor()
            total = total.to(square.device) + square
        self._sums = {}
        self.norm = total.sqrt()
        return self.norm

    def end_backward(self) -> None:
        """Called when a backward pass that stepped has ended."""
        if self.sums_norm and not self.clips_norm:
            self.take_norm()

    def prepare_clipping(self) -> bool:
        """Turns the measured norm into the clip coefficient; whether the norm is finite."""
        assert self.clip is not None
        norm = self.take_norm()
        # The formula of torch.nn.utils.clip_grads_with_norm_, with its epsilon.
        self._coefficient = torch.clamp(self.clip.limit / (norm + 1e-6), max=1.0)
        return self.on_nonfinite == "ignore" or bool(torch.isfinite(norm))

    def finish_clipping(self) -> None:
        """Forgets the coefficient: the next step needs its own."""
        self._coefficient = None

    def apply_to_held(self, params: Sequence[Tensor]) -> None:
        """Clips gradients that are all there, as the ordinary run does; ``params`` may lack a gradient."""
        if self.clips_norm:
            assert self.clip is not None
            self.norm = torch.nn.utils.clip_grad_norm_(params, self.clip.limit)
            if isinstance(self.norm, DTensor):
                self.norm = self.norm.full_tensor()
        else:
            self.apply([p.grad for p in params if p.grad is not None])
            self.end_backward()


class NonFiniteGradientError(FloatingPointError):
    """A gradient has NaN or infinite elements."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.gradient = gradient


def clip_by_value(gradients: Sequence[Tensor], limit: float) -> None:
    """As :func:`torch.nn.utils.clip_grad_value_`: every element into ``[-limit, limit]``, in place."""
    for local in map(local_tensor, gradients):
        local.clamp_(-limit, limit)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global L2 norm of gradients that are all there, over all ranks: 0-d float32."""
    treatment = GradientTreatment(None, grad_norm=True, on_nonfinite="ignore")
    treatment.measure(gradients)
    return treatment.take_norm()


def _copies(gradient: Tensor) -> int:
    """On how many ranks of its mesh each element of a DTensor lies: its replicated mesh dimensions multiplied."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = (gradient.device_mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate())
    return math.prod(sizes)


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
        FloatingPointError: the loss or, when clipping by norm, a gradient is not finite and that is an error.
    """
    run = loss.backward if run is None else run
    action = next((core.on_nonfinite for core in cores if core.on_nonfinite != "ignore"), "ignore")
    if action != "ignore" and (bad := _nonfinite_ranks(loss)):
        if action == "error":
            raise FloatingPointError(
                f"The loss is `{loss.item()}` on this rank and not finite on rank(s) {', '.join(map(str, bad))}. No"
                " parameter has moved in this step. Look at this batch and the learning rate, or pass"
                ' `on_nonfinite="skip"` to leave such steps out.'
            )
        with _phases(cores, "drop"):
            run()  # FSDP's own state is only in order again after a backward pass
        return False

    clipping = [core for core in cores if core.treatment.clips_norm and not core.holds]
    if not clipping:
        run()
        return True
    if any(core.has_held_gradients for core in clipping):
        # The norm is that of the sum over the micro-batches, known only when the last of them has been added.
        with _phases(clipping, "hold"):
            run()
        for core in clipping:
            core.optimizer_step_held()
        return True
    with _phases(cores, "drop"), _phases(clipping, "measure"):
        run(retain_graph=True)
    finite = [core.treatment.prepare_clipping() for core in clipping]
    try:
        if all(finite):
            run()
            return True
        if action == "error":
            raise FloatingPointError(
                "The norm of the gradients is not finite. No parameter has moved in this step. Look at this batch and"
                ' the learning rate, or pass `on_nonfinite="skip"` to leave such steps out.'
            )
        return False
    finally:
        for core in clipping:
            core.treatment.finish_clipping()


def _phases(cores: Sequence[OptimizerInBackward], phase: Phase) -> ExitStack:
    stack = ExitStack()
    for core in cores:
        stack.enter_context(core.in_phase(phase))
    return stack


def _nonfinite_ranks(loss: Tensor) -> list[int]:
    """The ranks on which the loss is not finite; the same list on every rank."""
    bad = (~torch.isfinite(loss.detach())).any().to(torch.int32)
    if not (dist.is_available() and dist.is_initialized()):
        return [0] if bad.item() else []
    flags = bad.new_zeros(dist.get_world_size())
    flags[dist.get_rank()] = bad
    dist.all_reduce(flags)
    return flags.nonzero().flatten().tolist()
