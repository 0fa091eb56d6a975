"""Each refusal is met as a user meets it, and README's table of limits has a row for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers import Lit, loader, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimInBwdMixin, SingleDeviceOptimInBwdStrategy, checks, refusals
from observing import LOOPS, with_mixin

ONE = "single_device_optim_in_bwd"
FSDP = "fsdp_optim_in_bwd"


def fit(
    strategy: Any, module: type[LightningModule] | LightningModule = Lit, loop: str = "automatic", **kw: Any
) -> None:
    if isinstance(module, type):
        module = seeded(with_mixin(module) if loop == "manual" else module)
    trainer(strategy=strategy, **{"max_steps": 2, **kw}).fit(module, loader(), loader(1))


# What is refused --------------------------------------------------------------------------------------------------


class UserManual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnsParameter(UserManual):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class NoData(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_buffer("table", torch.empty(2, device="meta"))


class SetsRate(Lit):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] /= 2


class Foreign(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3, 4))])


class Frozen(Lit):
    def configure_optimizers(self) -> Any:
        self.requires_grad_(False)
        return torch.optim.SGD(self.parameters())


class ClipsInHook(Lit):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class OwnBackward(Lit):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class ClipsItself(UserManual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.1)


class NotTheLast(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.set_is_last_backward(False)
        return super().training_step(batch, batch_idx)


class TwoBackwards(UserManual):
    """The second walks the part of the graph that needs the parameters as they were."""

    graphs = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        self.manual_backward(out.mean(), retain_graph=True)
        self.manual_backward((out if self.graphs == 1 else self.net(batch[0])).square().mean())


class Detached(Lit):
    """The last block's weight scales what the first layers give."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.stem(batch[0])
        x = x * self.net.head.weight.detach()
        return self.net.head(x).mean()


class OwnInplace(Lit):
    """Modifies what its own backward needs, before anything has stepped."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.head(self.net.stem(batch[0])).exp()
        loss = x.sum()
        x.add_(1)
        return loss


class TwoGraphs(TwoBackwards):
    graphs = 2


class SavesTooEarly(Lit):
    def on_after_backward(self) -> None:
        self.trainer.save_checkpoint("never.ckpt")


class Reentrant(Lit):
    """A block that is used twice, with reentrant checkpointing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.stem(batch[0])
        for _ in range(2):
            x = checkpoint(self.net.blocks[0], x, use_reentrant=True)
        return self.net.head(x).square().mean()


def with_optimizer(make: Callable[[list[nn.Parameter]], Any]) -> type[LightningModule]:
    return type("Lit", (Lit,), {"configure_optimizers": lambda self: make(list(self.parameters()))})


class Coupled(torch.optim.SGD):
    """Scales every step by the norm of all gradients, as LARS-like classes of one's own do."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.data.sub_(param.grad / norm, alpha=0.1)
        return loss


def _with_pre_hook(params: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.SGD(params)
    optimizer.register_step_pre_hook(lambda *args: None)
    return optimizer


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> LightningModule:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = seeded(Lit)
    module.net = wrap(module.net)
    return module


def _fsdp1(net: nn.Module) -> nn.Module:
    strategy = ShardingStrategy.NO_SHARD  # to which it switches on one rank, with a warning
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), sharding_strategy=strategy)


def _scaled() -> Any:
    return MixedPrecision("16-mixed", device="cpu")


def _swa() -> Any:
    return StochasticWeightAveraging(swa_lrs=1e-2)


def exact(module: type[LightningModule], **kwargs: Any) -> None:
    strategy = SingleDeviceOptimInBwdStrategy(gradient_clipping="exact")
    fit(strategy, module, **{"gradient_clip_val": 1.0, **kwargs})


class Refused(NamedTuple):
    """How a user comes to a rule, and what it then says."""

    rule: Callable[..., Any]
    provoke: Callable[[], Any]
    error: type[Exception]
    match: str


Wrong = MisconfigurationException
CASES: dict[str, Refused] = {
    "mixin last": Refused(
        checks.base_order,
        lambda: type("Wrong", (LightningModule, OptimInBwdMixin), {}),
        TypeError,
        r"names `LightningModule` before `OptimInBwdMixin`.*Write `class Wrong\(OptimInBwdMixin, LightningModule\)`",
    ),
    "mixin after a module": Refused(
        checks.base_order, lambda: type("Wrong", (Lit, OptimInBwdMixin), {}), TypeError, "Write `class Wrong"
    ),
    "two devices": Refused(
        checks.check_one_device, lambda: trainer(strategy=ONE, devices=2), Wrong, "`devices=2` was asked for"
    ),
    **{
        f"scaler {name} {loop}": Refused(
            checks.check_grad_scaler,
            lambda make=make, loop=loop: fit(make(), loop=loop, plugins=[_scaled()]),
            Wrong,
            "`precision='16-mixed'` scales the loss.*Use `precision='bf16-mixed'`",
        )
        for name, make in {
            "one by name": lambda: ONE,
            "one": SingleDeviceOptimInBwdStrategy,
            "FSDP by name": lambda: FSDP,
            "FSDP": FSDPOptimInBwdStrategy,
        }.items()
        for loop in LOOPS
    },
    "64 bits by name": Refused(
        checks.check_double_precision,
        lambda: fit(FSDP, precision="64-true"),
        Wrong,
        "`precision='64-true'` is not supported with FSDP2. Use `'32-true'`",
    ),
    "64 bits by a plugin": Refused(
        checks.check_double_precision,
        lambda: fit(FSDPOptimInBwdStrategy(enabled=False), plugins=[DoublePrecision()]),
        Wrong,
        "`precision='64-true'` is not supported",
    ),
    "sync_batchnorm by name": Refused(
        checks.check_sync_batchnorm,
        lambda: fit(FSDP, sync_batchnorm=True),
        Wrong,
        "`sync_batchnorm=True` has no effect with FSDP2.*convert_sync_batchnorm",
    ),
    "sync_batchnorm": Refused(
        checks.check_sync_batchnorm,
        lambda: fit(FSDPOptimInBwdStrategy(enabled=False), sync_batchnorm=True),
        Wrong,
        "`sync_batchnorm=True` has no effect",
    ),
    **{
        f"{name} {loop}": Refused(
            checks.check_weight_averaging,
            lambda make=make, loop=loop: fit(FSDP, loop=loop, callbacks=[make()]),
            Wrong,
            f"`{name}` deep-copies the LightningModule.*train on one device",
        )
        for name, make in {"StochasticWeightAveraging": _swa, "WeightAveraging": WeightAveraging}.items()
        for loop in LOOPS
    },
    "offload on an old torch": Refused(
        checks.check_offload,
        lambda: checks.check_offload(torch.device("cuda", 0), "2.12.1"),
        Wrong,
        "torch `2.12.1`.*pytorch#180666",
    ),
    **{
        f"{name} {strategy}": Refused(
            checks.check_wrapped,
            lambda wrap=wrap, strategy=strategy: fit(strategy, wrapped(wrap)),
            TypeError,
            f"`net` is wrapped in `{name}`.*Pass the bare module",
        )
        for name, wrap in {
            "DistributedDataParallel": DistributedDataParallel,
            "FullyShardedDataParallel": _fsdp1,
        }.items()
        for strategy in (ONE, FSDP)
    },
    "owns a parameter": Refused(
        checks.check_root_parameters, lambda: fit(FSDP, OwnsParameter), Wrong, "owns the parameter `scale` itself"
    ),
    "no data": Refused(
        checks.check_on_meta,
        lambda: fit(FSDP, NoData),
        RuntimeError,
        "1 parameters or buffers are on the `meta` device.*`net.table`",
    ),
    **{
        f"foreign parameter {strategy}": Refused(
            checks.check_foreign_parameters,
            lambda strategy=strategy: fit(strategy, Foreign),
            Wrong,
            r"1 parameters that `Foreign` does not have, the first of shape `\(3, 4\)`",
        )
        for strategy in (ONE, FSDP)
    },
    **{
        f"clipping as an error {loop}": Refused(
            checks.check_clipping,
            lambda loop=loop: fit(
                SingleDeviceOptimInBwdStrategy(gradient_clipping="error"), loop=loop, gradient_clip_val=0.5
            ),
            Wrong,
            "`gradient_clip_val=0.5` needs all gradients at once.*Pass `gradient_clipping='exact'`",
        )
        for loop in LOOPS
    },
    **{
        f"own clipping {treatment} {loop}": Refused(
            checks.check_clipping_hook,
            lambda treatment=treatment, loop=loop: fit(
                SingleDeviceOptimInBwdStrategy(gradient_clipping=treatment), ClipsInHook, loop
            ),
            Wrong,
            "`ClipsInHook.configure_gradient_clipping` is overridden",
        )
        for treatment in ("error", "exact")
        for loop in LOOPS
    },
    "own backward": Refused(
        checks.check_retain_graph,
        lambda: exact(OwnBackward),
        Wrong,
        "`OwnBackward.backward` takes `loss` and no `retain_graph`",
    ),
    "clip_gradients": Refused(
        checks.late_clipping,
        lambda: exact(ClipsItself, gradient_clip_val=None),
        Wrong,
        r"`clip_gradients\(0.1, 'norm'\)` came after.*OptimInBwdMixin",
    ),
    "not the last backward": Refused(
        checks.check_last_backward,
        lambda: fit(FSDP, NotTheLast),
        RuntimeError,
        r"`set_is_last_backward\(False\)` is set on `NotTheLast`.*accumulate_grad_batches",
    ),
    "one graph twice": Refused(
        checks.stepped_before_backward,
        lambda: fit(ONE, TwoBackwards),
        RuntimeError,
        r"Sum the losses and call backward once. \(autograd says",
    ),
    "detached parameter": Refused(
        checks.stepped_in_backward,
        lambda: fit(SingleDeviceOptimInBwdStrategy(granularity="parameter"), Detached),
        RuntimeError,
        r"2 parameters have been stepped in it.*`param.detach\(\).clone\(\)`",
    ),
    "two graphs": Refused(
        refusals.second_gradient,
        lambda: fit(ONE, TwoGraphs),
        RuntimeError,
        "second gradient arrived for parameter `net.head.bias`.*Sum the losses",
    ),
    "a rate set too late": Refused(
        refusals.changed_after_backward,
        lambda: fit(FSDP, SetsRate),
        RuntimeError,
        r"`lr` of parameter group 0 of this `AdamW` was set to `.*` after backward.*Set it before backward",
    ),
    **{
        f"saved too early {strategy} {loop}": Refused(
            checks.half_applied_step,
            lambda strategy=strategy, loop=loop: fit(strategy, SavesTooEarly, loop),
            checks.HalfAppliedStepError,
            "weights are those of no step and are not saved",
        )
        for strategy in (ONE, FSDP)
        for loop in LOOPS
    },
    "reentrant": Refused(
        refusals.second_gradient,
        lambda: fit(ONE, Reentrant),
        RuntimeError,
        "second gradient arrived for parameter `net.blocks.0.*Reentrant activation checkpointing.*`use_reentrant=False",
    ),
    "reentrant under FSDP2": Refused(  # the root's gradients, which would show the outer pass, are reduced at its end
        refusals.unseen_outer_pass,
        lambda: fit(FSDP, Reentrant),
        RuntimeError,
        "inside another one.*`use_reentrant=False`",
    ),
    **{
        f"needs a closure {strategy} {loop}": Refused(
            refusals.needs_closure,
            lambda strategy=strategy, loop=loop: fit(strategy, with_optimizer(torch.optim.LBFGS), loop),
            ValueError,
            "`LBFGS` needs a closure.*`enabled=False`",
        )
        for strategy in (ONE, FSDP)
        for loop in LOOPS
    },
    "differentiable": Refused(
        refusals.differentiable,
        lambda: fit(ONE, with_optimizer(lambda params: torch.optim.AdamW(params, differentiable=True))),
        ValueError,
        r"`AdamW\(differentiable=True\)` keeps the graph",
    ),
    "pre-hook": Refused(
        refusals.check_step_pre_hooks,
        lambda: fit(ONE, with_optimizer(_with_pre_hook)),
        ValueError,
        "has a `step` pre-hook",
    ),
    "looks across parameters": Refused(
        refusals.not_separable, lambda: fit(ONE, with_optimizer(Coupled)), ValueError, "`Coupled` .*`self_check=False`"
    ),
    "all frozen": Refused(
        refusals.nothing_trainable,
        lambda: fit(ONE, Frozen),
        ValueError,
        "holds 22 parameters and none requires a gradient",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of FSDP1
@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CASES[case]
    with pytest.raises(refused.error, match=refused.match) as error:
        refused.provoke()
    if refused.rule.__name__.startswith("check_"):
        assert error.traceback[-1].name == refused.rule.__name__
    assert not list(tmp_path.rglob("*.ckpt"))


def test_the_own_mistake_of_a_model_keeps_its_error() -> None:
    with pytest.raises(RuntimeError, match="^one of the variables needed for gradient computation"):
        fit(ONE, OwnInplace)


# README -----------------------------------------------------------------------------------------------------------

# Each row of README's table of what is refused, by how it begins, and the rules that it is about.
ROWS: dict[str, set[Any]] = {
    "An optimizer that needs a closure": {
        refusals.needs_closure,
        refusals.differentiable,
        refusals.check_step_pre_hooks,
        refusals.check_replaced_step,
    },
    "An optimizer whose step looks across": {refusals.not_separable, refusals.drawn_numbers},
    "An optimizer without trainable": {
        checks.check_foreign_parameters,
        refusals.nothing_trainable,
        refusals.check_hooked_parameters,
    },
    "Two backward calls": {checks.stepped_before_backward, refusals.second_gradient},
    "A hyperparameter set between": {refusals.changed_after_backward},
    "A parameter that the graph also uses": {checks.stepped_in_backward},
    "Reentrant activation checkpointing": {refusals.second_gradient, refusals.unseen_outer_pass},
    "`gradient_clip_val` with": {
        checks.check_clipping,
        checks.check_clipping_hook,
        checks.check_retain_graph,
        checks.late_clipping,
        refusals.check_second_pass,
    },
    "fp16": {checks.check_grad_scaler},
    "`64-true`": {checks.check_double_precision},
    "`sync_batchnorm=True`": {checks.check_sync_batchnorm},
    "`StochasticWeightAveraging`": {checks.check_weight_averaging},
    "Modules wrapped": {checks.check_wrapped, refusals.check_wrapped_parameters},
    "`set_is_last_backward(False)`": {checks.check_last_backward},
    "Manual optimization under FSDP2": {checks.check_root_parameters},
    "Parameters on the `meta` device": {checks.check_on_meta},
    "`cpu_offload`": {checks.check_offload},
    "Several devices": {checks.check_one_device},
    "`OptimInBwdMixin` after": {checks.base_order},
    "A checkpoint, or another step": {checks.half_applied_step, refusals.failed_pass},
}
# No limits of a Trainer's run: mistakes in a loop of one's own, and what `on_nonfinite` was asked to say.
NO_LIMITS: set[Any] = {
    refusals.not_an_optimizer,
    refusals.changed_groups,
    refusals.unmeasured_clipping,
    refusals.step_after_backwards,
    refusals.post_hook_without_step,
    refusals.loading_before_step,
    refusals.nonfinite_loss,
    refusals.nonfinite_gradient,
}


def rules(module: ModuleType) -> set[Any]:
    found = inspect.getmembers(module, inspect.isfunction)
    return {rule for name, rule in found if rule.__module__ == module.__name__ and not name.startswith("_")}


def test_every_rule_has_a_case() -> None:
    assert rules(checks) <= {case.rule for case in CASES.values()}


def test_readme_has_a_row_for_every_rule_and_no_other() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = readme.split("## Limits\n")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert len(rows) == len(ROWS)
    for row, beginning in zip(rows, ROWS, strict=True):
        assert row.startswith(beginning)
    assert set().union(*ROWS.values()) | NO_LIMITS == rules(checks) | rules(refusals)
