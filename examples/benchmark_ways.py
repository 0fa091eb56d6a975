"""The ways to step an optimizer that `benchmark.py` compares."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lightning_bwdopt import OptimizerInBackward
from lightning_bwdopt.states import optimizer_state
from lightning_bwdopt.units import units_of

ORDINARY = "ordinary fused"


class Unavailable(Exception):
    """This way cannot run here; the message says why."""


class Way:
    """One way to step: `backward`, then `finish`, make a step of gradients that the forward pass led to."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        self.model = model
        self.attach(list(model.parameters()), blocks)

    def attach(self, params: list[nn.Parameter], blocks: list[nn.Module]) -> None:
        """Makes the optimizer and registers what it needs; raises `Unavailable` where it is not installed."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """What the training loop calls on the loss."""
        loss.backward()

    def finish(self) -> None:
        """What the training loop calls after backward."""

    def step(self) -> None:
        """Steps gradients that are all there; raises `Unavailable` where the way has no such thing."""
        raise Unavailable

    def save(self) -> Any:
        """The optimizer's full state on the host of rank 0, as a checkpoint holds it."""
        raise Unavailable


class Ordinary(Way):
    """torch's own: a step after backward."""

    fused: bool | None = True

    def attach(self, params: list[nn.Parameter], blocks: list[nn.Module]) -> None:
        self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=self.fused)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.finish()

    def save(self) -> Any:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)


class OrdinaryForLoop(Ordinary):
    fused = None


class OrdinaryClipped(Ordinary):
    def finish(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().finish()


class InBackward(Ordinary):
    options: dict[str, Any] = {}

    def units(self, blocks: list[nn.Module]) -> Any:
        return units_of(self.model, blocks)

    def attach(self, params: list[nn.Parameter], blocks: list[nn.Module]) -> None:
        super().attach(params, blocks)
        self.core = OptimizerInBackward(self.optimizer, self.units(blocks), **self.options).attach(calls_step=True)

    def backward(self, loss: Tensor) -> None:
        self.core.backward(loss)

    def save(self) -> Any:
        # What the strategies' checkpoints call.
        return optimizer_state(self.model, self.optimizer, full=True) if dist.is_initialized() else super().save()

    def finish(self) -> None:
        super().finish()
        self.core.attach()  # the strategies call it before each batch


class InBackwardByParameter(InBackward):
    def units(self, blocks: list[nn.Module]) -> Any:
        return None


class InBackwardWithNorm(InBackward):
    options = {"grad_norm": True}


class InBackwardClipped(InBackward):
    options = {"clip": ("norm", 1.0)}


class OnePerParameter(Way):
    """One optimizer per parameter, stepped in its hook: what torchtune does."""

    fused: bool | None = True

    def attach(self, params: list[nn.Parameter], blocks: list[nn.Module]) -> None:
        self.optimizers = {p: torch.optim.AdamW([p], lr=1e-4, fused=self.fused) for p in params}
        self.register()

    def register(self) -> None:
        for param in self.optimizers:
            param.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, param: Tensor) -> None:
        self.optimizers[param].step()  # type: ignore[index]
        self.optimizers[param].zero_grad()  # type: ignore[index]

    def step(self) -> None:
        for param in self.optimizers:
            self.step_one(param)


class Torchtune(OnePerParameter):
    def register(self) -> None:
        try:
            from torchtune.training.memory import register_optim_in_bwd_hooks
        except ImportError as error:
            raise Unavailable(f"torchtune does not import: {error}") from None
        register_optim_in_bwd_hooks(self.model, self.optimizers)


class TorchtuneDefault(Torchtune):
    fused = None


class Optimi(Way):
    def attach(self, params: list[nn.Parameter], blocks: list[nn.Module]) -> None:
        try:
            import optimi
        except ImportError as error:
            raise Unavailable(f"optimi does not import: {error}") from None
        self.optimizer = optimi.AdamW(params, lr=1e-4, weight_decay=1e-2, gradient_release=True)
        optimi.prepare_for_gradient_release(self.model, self.optimizer)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


WAYS: dict[str, type[Way]] = {
    ORDINARY: Ordinary,
    "ordinary again": Ordinary,
    "ordinary for-loop": OrdinaryForLoop,
    "in backward, unit": InBackward,
    "in backward, parameter": InBackwardByParameter,
    "torchtune, fused": Torchtune,
    "torchtune, default": TorchtuneDefault,
    "hooks, fused": OnePerParameter,
    "optimi": Optimi,
    "in backward, norm": InBackwardWithNorm,
    "ordinary, clipped": OrdinaryClipped,
    "in backward, clipped": InBackwardClipped,
}
