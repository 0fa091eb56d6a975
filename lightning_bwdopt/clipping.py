"""Between a gradient's arrival and its step: exact clipping, the gradient norm, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_bwdopt import refusals
from lightning_bwdopt.arguments import NonFinite, check_choice
from lightning_bwdopt.views import aligned_gradient, local_tensor

# Gradients whose norms add up: where they are, the dtype to add them in, and a DTensor's mesh and placements.
Layout = tuple[torch.device, torch.dtype, DeviceMesh | None, tuple[Placement, ...]]


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
        clip: How to clip, as :func:`parse_clip` reads it.
        grad_norm: Sum the norm of gradients even where clipping does not need it.
        on_nonfinite: With ``"error"`` or ``"skip"`` every gradient is looked at.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(self, clip: tuple[str, float] | None, grad_norm: bool, on_nonfinite: str) -> None:
        check_choice("on_nonfinite", on_nonfinite, NonFinite)
        self.clip = parse_clip(clip)
        self.on_nonfinite = on_nonfinite
        self.norm: Tensor | None = None
        self.clips_norm = self.clip is not None and self.clip.kind == "norm"
        self.sums_norm = grad_norm  # also where clipping does not need the norm
        self._norms: dict[Layout, list[Tensor]] = {}  # 0-d, of gradients, each on its hook's stream
        self._largest: list[tuple[list[Tensor], Tensor]] = []  # parameters, largest magnitudes in their gradients: 1-d
        self._coefficient: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether gradients must be looked at before they are used."""
        return self.sums_norm or self.clip is not None or self.on_nonfinite != "ignore"

    def forget(self) -> None:
        """Drops what a backward pass that failed has left."""
        self._norms.clear()
        self._largest.clear()
        self._coefficient = None

    def apply(self, params: Sequence[Tensor]) -> None:
        """Looks at and clips, in place, the gradients of ``params``, which are about to be used.

        Raises:
            RuntimeError: clipping by norm, in a pass without a measured one before it (``passes.run_backward``).
        """
        if not self.clips_norm:
            self.measure(params)
        elif self._coefficient is None:
            assert self.clip is not None
            raise refusals.unmeasured_clipping(self.clip.limit)
        self._clip(params)

    def apply_to_held(self, params: Sequence[Tensor]) -> None:
        """Looks at and clips all the gradients of a step at once, as the ordinary run does."""
        self.measure(params)
        if self.clips_norm:
            self.prepare_clipping()
            self._clip(params)
            self._coefficient = None
        else:
            self._clip(params)
            self.end_backward()

    def _clip(self, params: Sequence[Tensor]) -> None:
        if self.clip is None or not params:
            return
        for param in params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()  # or `_local` would be of a copy
        gradients = [_local(aligned_gradient(p)) for p in params]
        if self.clip.kind == "value":  # the operations of torch.nn.utils.clip_grad_value_
            torch._foreach_clamp_min_(gradients, -self.clip.limit)
            torch._foreach_clamp_max_(gradients, self.clip.limit)
        else:  # and of torch.nn.utils.clip_grads_with_norm_
            assert self._coefficient is not None
            torch._foreach_mul_(gradients, self._coefficient.to(gradients[0].device))

    def measure(self, params: Sequence[Tensor]) -> None:
        """Adds gradients to the norm and to what is known of bad ones: this rank's part, reduced when it is taken."""
        gradients = [aligned_gradient(p) for p in params]
        if self.on_nonfinite != "ignore":
            filled = [(p, local) for p, g in zip(params, gradients) if (local := _local(g)).numel()]
            if filled:
                # NaN is the largest of all, and the magnitude of a finite element is finite in its own dtype.
                largest = torch._foreach_norm([local for _, local in filled], math.inf)
                self._largest.append(([p for p, _ in filled], torch.stack(largest)))
        if self.sums_norm or self.clips_norm:
            self.add_to_norm([g for g in gradients if g is not None])

    def add_to_norm(self, gradients: Sequence[Tensor]) -> None:
        """Adds this rank's part of the gradients to the norm."""
        by_layout: dict[Layout, list[Tensor]] = {}
        for gradient in gradients:
            # bfloat16 is too coarse for a sum, and float64 cannot be narrowed.
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            place = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
            local = _local(gradient)
            by_layout.setdefault((local.device, dtype, *place), []).append(local)
        for layout, locals_ in by_layout.items():
            self._norms.setdefault(layout, []).extend(torch._foreach_norm(locals_, 2, dtype=layout[1]))

    def take_norm(self) -> Tensor:
        """Reduces what was measured over its ranks, starts anew, and keeps the result as :attr:`norm`."""
        total = torch.zeros(())
        for (*_, mesh, placements), norms in self._norms.items():
            square = torch.stack(norms).square().sum()
            if mesh is not None:
                # An element that lies on several ranks is counted on each of them.
                square /= math.prod(mesh.size(dim) for dim, place in enumerate(placements) if place.is_replicate())
                square = square.to(mesh.device_type)  # of offloaded gradients, too: `nccl` reduces only there
                for dim in range(mesh.ndim):
                    dist.all_reduce(square, group=mesh.get_group(dim))
            total = total.to(square.device) + square
        self._norms.clear()
        self.norm = total.sqrt()
        return self.norm

    def take_nonfinite(self, params: Sequence[Tensor], *, distributed: bool) -> Tensor | None:
        """The parameter whose bad gradient was looked at first, on any rank; forgets them all.

        Args:
            params: All parameters, in the same order on every rank.
            distributed: Whether other ranks look at shards of the same gradients.
        """
        if self.on_nonfinite == "ignore":
            return None
        looked_at, self._largest = self._largest, []
        order = [id(p) for unit, _ in looked_at for p in unit]
        bad = torch.zeros(len(params), dtype=torch.int32, device=local_tensor(params[0]).device)
        if looked_at:
            index = {id(p): i for i, p in enumerate(params)}
            finite = torch.cat([largest.isfinite().to(bad.device) for _, largest in looked_at])
            bad[[index[key] for key in order]] = (~finite).int()
        if distributed:
            dist.all_reduce(bad)
        if not bad.any():
            return None
        named = {id(p): p for p, count in zip(params, bad.tolist(), strict=True) if count}
        return next(named[key] for key in (*order, *named) if key in named)

    def end_backward(self) -> None:
        """Called when a backward pass that stepped has ended."""
        if self.sums_norm and not self.clips_norm:
            self.take_norm()

    def prepare_clipping(self) -> None:
        """Turns the measured norm into the clip coefficient."""
        assert self.clip is not None
        # The formula of torch.nn.utils.clip_grads_with_norm_, with its epsilon.
        self._coefficient = torch.clamp(self.clip.limit / (self.take_norm() + 1e-6), max=1.0)


def _local(gradient: Tensor | None) -> Tensor:
    """This rank's part of a gradient; of a sparse one the values, each of which is one element of it."""
    assert gradient is not None
    # The gradient itself stays as it came: an optimizer adds up duplicate entries in another order than `coalesce`.
    return gradient.coalesce()._values() if gradient.is_sparse else local_tensor(gradient)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global L2 norm of gradients that are all there, over all ranks: 0-d; float32, or float64 for float64."""
    treatment = GradientTreatment(None, grad_norm=True, on_nonfinite="ignore")
    treatment.add_to_norm([_reduced(gradient) for gradient in gradients])
    return treatment.take_norm()


def _reduced(gradient: Tensor) -> Tensor:
    """A DTensor that is a partial sum on each rank, summed; any other as it is."""
    if not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
