"""Losses and gradients that are not finite: named on every rank, or the step left out as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from helpers import Lit, Net, assert_equal, full, loader, run_distributed, seeded, trainer
from lightning_bwdopt import (
    FSDPOptimInBwdStrategy,
    OptimInBwdMixin,
    OptimizerInBackward,
    SingleDeviceOptimInBwdStrategy,
)
from lightning_bwdopt.passes import run_backward

BAD_BATCHES = (2, 5)
RANK = 1  # the rank whose loss is bad


class Bad(Lit):
    """The loss is NaN in some batches, on one rank; a plateau scheduler beside the one by step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rank = self.trainer.global_rank if self.trainer.world_size > 1 else RANK
        return loss * float("nan") if batch_idx in BAD_BATCHES and rank == RANK else loss

    def configure_optimizers(self) -> Any:
        config = super().configure_optimizers()
        optimizer = config["optimizer"]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [
            {**config["lr_scheduler"], "frequency": 1},
            {"scheduler": plateau, "interval": "step", "monitor": "fixed"},
            {"scheduler": by_epoch, "interval": "epoch"},
        ]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("fixed", torch.tensor(1.0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = [*getattr(self, "seen", []), self.snapshot()]

    def snapshot(self) -> Any:
        """Everything that a step moves, except that the plateau scheduler moves after this hook."""
        optimizer = self.trainer.optimizers[0]
        return {
            "weights": {name: full(p).detach().clone() for name, p in self.named_parameters()},
            "state": [{k: full(v).clone() for k, v in entry.items()} for entry in optimizer.state.values()],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs[:1]],
            "plateau": dict(self.trainer.lr_scheduler_configs[1].scheduler.state_dict()),
        }


class BadManual(OptimInBwdMixin, Bad):
    pass


def run(module: LightningModule, strategy: Any, ranks: int = 1, **kwargs: Any) -> Any:
    fitted = trainer(devices=ranks, strategy=strategy, max_epochs=1, max_steps=-1, **kwargs)
    torch.manual_seed(11)
    fitted.fit(module, loader(batches=8, ranks=ranks))
    return fitted


def check_skip(strategy: type[Any], ranks: int, **kwargs: Any) -> None:
    counts = []
    for cls in (Bad, BadManual):
        module = seeded(cls)
        fitted = run(module, strategy(on_nonfinite="skip", **kwargs), ranks)
        assert len(module.seen) == 8
        for batch in range(1, 8):
            moved = batch not in BAD_BATCHES
            before, after = module.seen[batch - 1], module.seen[batch]
            for part in ("weights", "state", "schedulers"):
                if moved:
                    with pytest.raises(AssertionError):
                        assert_equal(after[part], before[part])
                else:
                    assert_equal(after[part], before[part])
        # The plateau scheduler moves at the end of each batch, after the snapshot: one batch later.
        for batch in range(2, 8):
            same = module.seen[batch]["plateau"] == module.seen[batch - 1]["plateau"]
            assert same == (batch - 1 in BAD_BATCHES), batch
        plateau, by_epoch = (config.scheduler for config in fitted.lr_scheduler_configs[1:])
        assert plateau.last_epoch == 6
        assert by_epoch.last_epoch == 1
        assert [config.frequency for config in fitted.lr_scheduler_configs] == [1, 1, 1]
        for p in module.parameters():
            assert torch.isfinite(full(p)).all()
        counts.append(fitted.global_step)
    assert counts == [8, 8]  # as with a GradScaler, below


def check_error(strategy: type[Any], ranks: int) -> None:
    for cls in (Bad, BadManual):
        module = seeded(cls)
        words = rf"In step 2 the loss is not finite on rank\(s\) {RANK if ranks > 1 else 0} \(`.*No parameter has moved"
        with pytest.raises(FloatingPointError, match=words):
            run(module, strategy(on_nonfinite="error"), ranks)


def on_two_ranks() -> None:
    check_skip(FSDPOptimInBwdStrategy, 2)
    check_error(FSDPOptimInBwdStrategy, 2)
    check_gradient(FSDPOptimInBwdStrategy, 2)


@pytest.mark.parametrize("granularity", ["unit", "parameter"])
def test_skip_on_one_device(granularity: str) -> None:
    check_skip(SingleDeviceOptimInBwdStrategy, 1, granularity=granularity)


def test_error_on_one_device() -> None:
    check_error(SingleDeviceOptimInBwdStrategy, 1)


def test_gradient_on_one_device() -> None:
    check_gradient(SingleDeviceOptimInBwdStrategy, 1)


def test_two_ranks() -> None:
    run_distributed(on_two_ranks)


def test_ignore_is_the_ordinary_run() -> None:
    """NaN goes where it goes in an ordinary run."""
    ours, ordinary = seeded(Bad), seeded(Bad)
    run(ours, SingleDeviceOptimInBwdStrategy())
    run(ordinary, SingleDeviceOptimInBwdStrategy(enabled=False))
    assert_equal(ours.snapshot()["weights"], ordinary.snapshot()["weights"])


def test_global_step_as_with_a_scaler() -> None:
    """Lightning counts a step that a GradScaler has skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module = seeded(Bad)
    fitted = trainer(max_epochs=1, max_steps=-1, plugins=[plugin])
    fitted.fit(module, loader(batches=3))
    assert fitted.global_step == 3
    assert {int(entry["step"]) for entry in fitted.optimizers[0].state.values()} == {2}


# Gradients --------------------------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """The identity, whose backward is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


class Poisoned(Lit):
    """In batch 1 the gradient of the stem, and of nothing else, is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        if batch_idx == 1:
            x = Poison.apply(x)
        for block in self.net.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.net.head(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = [full(p).detach().clone() for p in self.parameters()]
        self.seen = [*getattr(self, "seen", []), (weights, self.trainer.optimizers[0].param_groups[0]["lr"])]


def check_gradient(strategy: type[Any], ranks: int) -> None:
    named = r"In step 1 the gradient of parameter `net.stem.(weight|bias)` has NaN or infinite elements. "
    for action in ("error", "skip"):  # seen too late to be left out
        with pytest.raises(FloatingPointError, match=named + "Parameters have moved"):
            run(seeded(Poisoned), strategy(on_nonfinite=action), ranks)
    exact = {"gradient_clip_val": 0.1}
    with pytest.raises(FloatingPointError, match=named + "No parameter has moved"):
        run(seeded(Poisoned), strategy(on_nonfinite="error", gradient_clipping="exact"), ranks, **exact)
    module = seeded(Poisoned)
    run(module, strategy(on_nonfinite="skip", gradient_clipping="exact"), ranks, **exact)
    assert_equal(module.seen[1], module.seen[0])
    assert module.seen[2][1] > module.seen[1][1]
    assert all(torch.isfinite(w).all() for w in module.seen[-1][0])


# Bare loops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_step", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("clip", [None, ("norm", 0.1)])
def test_a_bad_micro_batch_leaves_out_the_whole_step(calls_step: bool, bad: int, clip: Any) -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters())
    core = OptimizerInBackward(optimizer, clip=clip, on_nonfinite="skip").attach(calls_step=calls_step)

    def step(bad: int | None) -> bool:
        for number in range(3):
            loss = net(torch.randn(4, 6)).square().mean() * (float("inf") if number == bad else 1.0)
            if number < 2:
                with core.accumulate():
                    moved = core.backward(loss)
            else:
                moved = core.backward(loss)
        if calls_step:
            optimizer.step()
        return moved

    assert step(None)
    before = [p.detach().clone() for p in net.parameters()], optimizer.state_dict()
    assert not step(bad)
    assert all(p.grad is None for p in net.parameters())
    assert_equal(([p.detach() for p in net.parameters()], optimizer.state_dict()), before)
    assert step(None)
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert core.steps == 3


@pytest.mark.parametrize("action", ["skip", "error"])
def test_held_gradients_are_looked_at_before_any_is_used(action: str) -> None:
    net = Net(dropout=0.0)
    core = OptimizerInBackward(torch.optim.SGD(net.parameters(), lr=0.1), on_nonfinite=action)  # type: ignore[arg-type]
    core.parameter_names = {id(p): name for name, p in net.named_parameters()}
    before = [p.detach().clone() for p in net.parameters()]
    with core.attach():
        with core.accumulate():
            net.head(Poison.apply(net.stem(torch.randn(4, 6)))).sum().backward()
        if action == "skip":
            core.optimizer.step()
        else:
            with pytest.raises(FloatingPointError, match=r"`net.stem.bias`|`stem.(weight|bias)`.*No parameter"):
                core.optimizer.step()
        assert_equal([p.detach() for p in net.parameters()], before)


def test_a_second_loss_of_the_step_cannot_be_left_out() -> None:
    left, right = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()])
    with OptimizerInBackward(optimizer, on_nonfinite="skip").attach(calls_step=True) as core:
        assert core.backward(left(torch.ones(1, 3)).sum())
        with pytest.raises(FloatingPointError, match="2 parameters have moved by another loss of this step"):
            core.backward(right(torch.ones(1, 3)).sum() * float("nan"))
        optimizer.step()
        assert not core.backward(left(torch.ones(1, 3)).sum() * float("nan"))
        assert not core.backward(right(torch.ones(1, 3)).sum())  # the step is left out as a whole
        optimizer.step()
        assert core.backward(right(torch.ones(1, 3)).sum())


def test_several_optimizers_leave_out_the_step_together() -> None:
    net = Net()
    optimizers = [torch.optim.SGD(net.blocks.parameters()), torch.optim.AdamW(net.head.parameters())]
    cores = [OptimizerInBackward(o, on_nonfinite="skip").attach() for o in optimizers]
    before = [p.detach().clone() for p in net.parameters()]
    assert not run_backward(cores, net(torch.randn(4, 6)).sum() / 0.0)
    assert_equal([p.detach() for p in net.parameters()], before)
    assert run_backward(cores, net(torch.randn(4, 6)).sum())
