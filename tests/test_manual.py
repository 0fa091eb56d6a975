from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import softplus

from helpers import Lit, Net, alive_gradients, assert_equal, loader, seeded, trainer
from lightning_bwdopt import OptimInBwdMixin, SingleDeviceOptimInBwdStrategy
from observing import assert_same_runs, moved, observe


class Manual(Lit):
    """Steps its optimizer itself, in the way that a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.alive: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.train_on(loss)
        return loss

    def train_on(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.alive.append(alive_gradients(self.parameters()))
        optimizer.step()
        self.lr_schedulers().step()


class StepsTwice(Manual):
    """A second `step()` finds nothing to do."""

    def train_on(self, loss: Tensor) -> None:
        super().train_on(loss)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        optimizer.step()


class RawOptimizer(Manual):
    """Calls the optimizer itself, which Lightning does not count."""

    def train_on(self, loss: Tensor) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class WithClosure(Manual):
    def train_on(self, loss: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)


class RetainsGraph(Manual):
    def train_on(self, loss: Tensor) -> None:
        self.manual_backward(loss, retain_graph=True)
        assert loss.grad_fn is not None
        self.optimizers().step()
        self.optimizers().zero_grad()


class SkipsBatches(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class DisjointLosses(Manual):
    """Two losses that share no parameter, with a backward call each and one step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Net(depth=1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = [nn.functional.mse_loss(net(x), y) for net in (self.net, self.other)]
        self.losses += [loss.detach().clone() for loss in losses]
        for loss in losses:
            self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


@pytest.mark.parametrize(
    "module", [Manual, StepsTwice, RawOptimizer, WithClosure, RetainsGraph, SkipsBatches, DisjointLosses]
)
def test_user_code_that_steps_by_itself_gives_the_ordinary_run(module: type[Manual]) -> None:
    limits: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "batches": 6}
    run = assert_same_runs(module, **limits)
    assert run["global_step"] == {RawOptimizer: 0, SkipsBatches: 3, StepsTwice: 12}.get(module, 6)
    assert moved(run["weights"], module)


def test_gradients_are_gone_when_manual_backward_returns() -> None:
    module = seeded(Manual)
    run = trainer(max_steps=3, strategy=SingleDeviceOptimInBwdStrategy())
    run.fit(module, loader(), loader(2))
    assert module.alive == [0, 0, 0]


class SharedLosses(Manual):
    """Two backward calls in a step that reach the same parameters, with one graph or with two."""

    graphs = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.graphs == 1:
            out = self.net(batch[0])
            self.manual_backward(out.mean(), retain_graph=True)
            self.manual_backward(out.square().mean())
        else:
            self.manual_backward(self.loss(batch))
            self.manual_backward(self.loss(batch))
        self.optimizers().step()


@pytest.mark.parametrize("graphs", [1, 2])
def test_second_gradient_of_a_step_is_an_error_that_says_to_sum_the_losses(graphs: int) -> None:
    module = seeded(SharedLosses)
    module.graphs = graphs
    run = trainer(max_steps=1, strategy=SingleDeviceOptimInBwdStrategy())
    with pytest.raises(RuntimeError, match="Sum the losses and call backward once"):
        run.fit(module, loader(), loader(2))


class Gan(LightningModule):
    """Generator and discriminator with an optimizer each; the discriminator trains every second batch."""

    toggles = True
    clips = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Net(depth=2)
        self.discriminator = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
        self.losses: list[Tensor] = []
        self.rates: list[Any] = []

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]

    def optimize(self, optimizer: Any, loss_of: Callable[[], Tensor]) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        self.losses.append(loss.detach().clone())
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clips:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        generator, discriminator = self.optimizers()
        self.optimize(generator, lambda: softplus(-self.discriminator(self.generator(x))).mean())
        if batch_idx % 2:
            self.optimize(discriminator, lambda: self.discriminator_loss(x, y))

    def discriminator_loss(self, x: Tensor, y: Tensor) -> Tensor:
        fake = self.generator(x).detach()
        return softplus(-self.discriminator(y)).mean() + softplus(self.discriminator(fake)).mean()


class UntoggledGan(Gan):
    toggles = False


class ClosureGan(Gan):
    """As in the documentation of `LightningOptimizer.step`."""

    def optimize(self, optimizer: Any, loss_of: Callable[[], Tensor]) -> None:
        def closure() -> None:
            loss = loss_of()
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)

        with optimizer.toggle_model() if self.toggles else nullcontext():
            optimizer.step(closure=closure)


class UntoggledClosureGan(ClosureGan):
    toggles = False


HELD = "`manual_backward` was called with 2 optimizers and none toggled"


@pytest.mark.parametrize("module", [Gan, UntoggledGan, ClosureGan, UntoggledClosureGan])
def test_gan_equals_the_ordinary_run(module: type[Gan]) -> None:
    run = assert_same_runs(module, max_steps=-1, max_epochs=2, batches=5, ignore=(HELD,))
    assert run["global_step"] == 14
    assert moved(run["weights"], module)
    warned = observe("automatic", module, max_steps=-1, max_epochs=2, batches=5)["warnings"]
    assert sum(text.startswith(HELD) and "self.toggle_optimizer(optimizer)" in text for text in warned) == (
        not module.toggles
    )


class ReturnsLoss(Lit):
    """Two optimizers for one loss, which only the mixin takes with automatic optimization."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if not any(p is m for m in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in optimizers]
        return [
            {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True)
        ]


class StepsBoth(ReturnsLoss):
    """The same, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(loss)
        for optimizer in (first._optimizer, second):  # counted once
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss


def test_returned_loss_steps_all_optimizers_of_the_mixin() -> None:
    ordinary = observe("ordinary", StepsBoth, max_steps=5)
    run = observe("manual", ReturnsLoss, max_steps=5)
    for key in ("losses", "rates", "weights", "state", "groups", "global_step", "schedulers", "logged"):
        assert_equal(run[key], ordinary[key], key)
    assert run["global_step"] == 5


def test_returned_loss_steps_all_optimizers_with_accumulation_and_clipping() -> None:
    """Against one optimizer of all parameters, which is the same thing for equal hyperparameters."""

    def one(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def two(self: Any) -> Any:
        params = list(self.parameters())
        return [torch.optim.SGD(params[i::2], lr=0.1, momentum=0.9) for i in range(2)]

    limits: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "batches": 5, "accumulate_grad_batches": 2}
    clip: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ordinary = observe("ordinary", type("Lit", (Lit,), {"configure_optimizers": one}), **limits, **clip)
    module = type("Lit", (Lit,), {"configure_optimizers": two})
    run = observe("manual", module, options={"gradient_clipping": "exact"}, **limits, **clip)
    assert_equal(run["weights"], ordinary["weights"])
    assert run["global_step"] == ordinary["global_step"] == 3


def test_several_optimizers_without_the_mixin_are_refused_as_in_the_ordinary_run() -> None:
    for loop in ("ordinary", "automatic"):
        with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
            observe(loop, ReturnsLoss)


class NoOptimizer(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> None:
        return None


class ManualWithoutOptimizer(NoOptimizer):
    """Trains a net with an optimizer that Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.own.zero_grad()
        self.manual_backward(loss)
        self.own.step()


@pytest.mark.parametrize("module", [NoOptimizer, ManualWithoutOptimizer])
def test_no_optimizer_is_no_optimizer(module: type[LightningModule]) -> None:
    run = assert_same_runs(module, max_steps=-1, max_epochs=1, batches=3)
    assert len(run["losses"]) == 3
    assert sum("returned `None`, this fit will run with no optimizer" in text for text in run["warnings"]) == 1


class SkipsRestOfEpoch(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class SkipsSteps(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("module", [SkipsRestOfEpoch, SkipsSteps])
def test_skipping_works_as_in_the_ordinary_run(module: type[Lit], accumulate: int) -> None:
    assert_same_runs(
        module,
        max_steps=-1,
        max_epochs=3,
        batches=4,
        accumulate_grad_batches=accumulate,
        ignore=("`accumulate_grad_batches=", "`training_step` returned `None`"),  # Lightning warns once per process
    )


class WatchesItself(OptimInBwdMixin, Lit):
    """Keeps `automatic_optimization` where the user's code can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["training_step"] = self.automatic_optimization
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen["on_before_backward"] = self.automatic_optimization

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["on_before_optimizer_step"] = self.automatic_optimization

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen["on_train_batch_end"] = self.automatic_optimization

    def on_validation_batch_start(self, *args: Any) -> None:
        self.seen["on_validation_batch_start"] = self.automatic_optimization


def test_optimization_is_manual_from_a_batch_to_the_end_of_its_backward() -> None:
    module = seeded(WatchesItself)
    run = trainer(max_steps=3, strategy=SingleDeviceOptimInBwdStrategy())
    run.fit(module, loader(3), loader(2))
    assert module.seen == {
        "training_step": False,
        "on_before_backward": False,
        "on_before_optimizer_step": True,
        "on_train_batch_end": True,
        "on_validation_batch_start": True,
    }
    assert module.automatic_optimization
    ordinary = seeded(WatchesItself)
    trainer(max_steps=3, strategy=SingleDeviceOptimInBwdStrategy(enabled=False)).fit(ordinary, loader(3), loader(2))
    assert len(ordinary.seen) == 5
    assert all(ordinary.seen.values())


class OnlyReturns(OptimInBwdMixin, Lit):
    """Declares manual optimization, and leaves the backward to the mixin, or to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReturnsInDict(OnlyReturns):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}


@pytest.mark.parametrize(("module", "batches", "told"), [(OnlyReturns, 12, 10), (ReturnsInDict, 3, 6)])
def test_a_loss_that_is_only_returned_is_told_of(module: type[Lit], batches: int, told: int) -> None:
    settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "batches": batches}
    ordinary, run = (observe(loop, module, **settings) for loop in ("ordinary", "automatic"))
    said = f"`{module.__name__}` sets `automatic_optimization = False`.*returned {told} losses.*nothing is trained"
    (warning,) = (text for text in run["warnings"] if text not in ordinary["warnings"])
    assert re.match(said, warning)
    start = {name: weight.detach() for name, weight in seeded(module).named_parameters()}
    for result in (ordinary, run):  # the ordinary one does not say so
        assert_equal(result["weights"], start)


class LeavesOutBatches(OptimInBwdMixin, Manual):
    """Sends no loss backward in the first batches, and in every second one."""

    how = "manual_backward"

    def train_on(self, loss: Tensor) -> None:
        batch = len(self.losses)
        if batch < 4 or batch % 2:
            return
        if self.how == "manual_backward":
            super().train_on(loss)
            return
        loss.backward()  # which the strategy does not see
        optimizer = self.optimizers(use_pl_optimizer=self.how == "backward")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["manual_backward", "backward", "backward of the raw optimizer"])
def test_a_module_that_leaves_out_batches_is_not_warned_of(how: str) -> None:
    module = type("Leaves", (LeavesOutBatches,), {"how": how})
    run = assert_same_runs(module, loops=("automatic",), max_steps=-1, max_epochs=1, batches=16)
    assert moved(run["weights"], module)
