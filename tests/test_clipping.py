"""Exact clipping against the ordinary run's: by value to the bit, by norm within 1e-6 of every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import Block, Net, assert_equal, full, loader, run_distributed, seeded, trainer
from lightning_bwdopt import (
    FSDPOptimInBwdStrategy,
    OptimInBwdMixin,
    OptimizerInBackward,
    SingleDeviceOptimInBwdStrategy,
)
from lightning_bwdopt.units import units_of

LIMIT = {"norm": 0.02, "value": 0.003}  # below what the gradients have in every step


class Hard(nn.Module):
    """Dropout, non-reentrant checkpointing, a tied weight and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 10)
        self.first = nn.Linear(10, 6)
        self.stem = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(10, 6)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(torch.tanh(self.first(self.lift(x))))
        for block in self.blocks:
            x = self.dropout(checkpoint(block, x, use_reentrant=False))
        return self.last(x).mean(dim=1, keepdim=True)


class Plain(LightningModule):
    """Counts, in hooks on the parameters, how many gradients are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Hard()
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def configure_optimizers(self) -> Any:
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(self.count)
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def count(self, param: Tensor) -> None:
        self.alive.append(sum(p.grad is not None for p in self.parameters()))


class ManualPath(OptimInBwdMixin, Plain):
    pass


class Watch(Callback):
    """Counts the hooks around backward and keeps the norms before clipping."""

    def __init__(self) -> None:
        self.before = self.after = 0
        self.norms: list[Tensor] = []

    def on_train_start(self, run: Any, *args: Any) -> None:
        for core in run.strategy.optimizers_in_backward:
            core.treatment.sums_norm = True

    def on_before_backward(self, *args: Any) -> None:
        self.before += 1

    def on_after_backward(self, *args: Any) -> None:
        self.after += 1

    def on_before_optimizer_step(self, run: Any, module: LightningModule, optimizer: Any) -> None:
        if run.strategy.enabled:
            self.norms.append(run.strategy.optimizers_in_backward[0].grad_norm)
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(full(nn.utils.get_total_norm(gradients)))


def fit(kind: str, module: type[Plain], strategy: type[Any], enabled: bool, **kwargs: Any) -> dict[str, Any]:
    steps = kwargs["max_steps"]
    ranks = 1 if strategy is SingleDeviceOptimInBwdStrategy else 2
    options = {"gradient_clipping": "exact"} if enabled else {}
    if ranks == 1:  # the strategy joins small units of one device
        options["granularity"] = "parameter"
    watch = Watch()
    accumulate = kwargs.get("accumulate_grad_batches", 1)
    run = trainer(
        devices=ranks,
        strategy=strategy(enabled=enabled, **options),
        gradient_clip_val=LIMIT[kind],
        gradient_clip_algorithm=kind,
        callbacks=[watch],
        **kwargs,
    )
    model = seeded(module)
    torch.manual_seed(11)
    run.fit(model, loader(batches=steps * accumulate, ranks=ranks))
    assert run.global_step == steps
    assert watch.before == watch.after == steps * accumulate
    return {
        "weights": {name: full(p).detach() for name, p in model.named_parameters()},
        "state": [{k: full(v) for k, v in entry.items()} for entry in run.strategy.optimizers[0].state.values()],
        "norms": watch.norms,
        "alive": model.alive,
        "limit": 1 if ranks == 1 else max(len(unit) for unit in units_of(model)),
    }


def compare(kind: str, module: type[Plain], strategy: type[Any], **kwargs: Any) -> None:
    """Runs both and says what must agree."""
    ordinary = fit(kind, Plain, strategy, enabled=False, **kwargs)
    ours = fit(kind, module, strategy, enabled=True, **kwargs)
    torch.testing.assert_close(ours["norms"], ordinary["norms"], rtol=1e-6, atol=0)
    steps = kwargs["max_steps"]
    assert len(ours["norms"]) == steps
    if kind == "value":
        assert_equal(ours["weights"], ordinary["weights"])
        assert_equal(ours["state"], ordinary["state"])
    else:
        assert min(ours["norms"]) > LIMIT["norm"]  # each step was clipped
        for name, weight in ordinary["weights"].items():
            distance = (ours["weights"][name] - weight).abs().max()
            assert distance <= 1e-6, f"{name} is off by {distance}"
    if "accumulate_grad_batches" not in kwargs:
        passes = 2 if kind == "norm" else 1
        trained = len(ordinary["alive"]) // steps
        assert len(ours["alive"]) == passes * steps * trained
        assert max(ordinary["alive"]) == trained
        assert max(ours["alive"]) <= ours["limit"]


CASES: dict[str, tuple[str, type[Plain], dict[str, Any]]] = {
    "norm, automatic": ("norm", Plain, {"max_steps": 20}),
    "norm, manual": ("norm", ManualPath, {"max_steps": 20}),
    "norm, automatic, bf16": ("norm", Plain, {"max_steps": 20, "precision": "bf16-mixed"}),
    "norm, manual, bf16": ("norm", ManualPath, {"max_steps": 20, "precision": "bf16-mixed"}),
    "norm, manual, accumulation": ("norm", ManualPath, {"max_steps": 6, "accumulate_grad_batches": 2}),
    "value, manual": ("value", ManualPath, {"max_steps": 6}),
    "value, automatic, accumulation": ("value", Plain, {"max_steps": 6, "accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:`accumulate_grad_batches=2` with the optimizer in backward")
def test_one_device(case: str) -> None:
    kind, module, options = CASES[case]
    compare(kind, module, SingleDeviceOptimInBwdStrategy, **options)


def on_two_ranks() -> None:
    for kind, module, options in CASES.values():
        compare(kind, module, FSDPOptimInBwdStrategy, **options)


@pytest.mark.filterwarnings("ignore:`accumulate_grad_batches=2` with the optimizer in backward")
def test_two_ranks() -> None:
    run_distributed(on_two_ranks)


# The norm alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, ("norm", 0.05), ("value", 0.01)])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_norm_is_what_torch_returns(clip: Any, accumulates: bool, dtype: torch.dtype) -> None:
    def train(in_backward: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net().to(dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        core = OptimizerInBackward(optimizer, clip=clip, grad_norm=True)
        if in_backward:
            core.attach()
        norms = []
        for _ in range(4):
            if accumulates:
                with core.accumulate():
                    net(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
            loss = net(torch.randn(4, 6, dtype=dtype)).square().mean()
            if in_backward:
                core.backward(loss)
                norms.append(core.grad_norm)
            else:
                loss.backward()
                norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]))
                if clip and clip[0] == "norm":
                    nn.utils.clip_grad_norm_(net.parameters(), clip[1])
                elif clip:
                    nn.utils.clip_grad_value_(net.parameters(), clip[1])
                optimizer.step()
                optimizer.zero_grad()
        return norms

    torch.testing.assert_close(train(True), train(False), rtol=1e-6 if dtype is torch.float32 else 1e-15, atol=0)


def test_failed_backward_does_not_add_to_the_next_norm() -> None:
    net = Net(dropout=0.0)
    core = OptimizerInBackward(torch.optim.SGD(net.parameters(), lr=0.0), grad_norm=True).attach(calls_step=True)
    x = torch.randn(4, 6)
    net(x).sum().backward()
    core.optimizer.step()
    expected = core.grad_norm

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    output = net.blocks[0](net.stem(x))
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        net.head(output).sum().backward()
    core.optimizer.step()
    net(x).sum().backward()
    assert_equal(core.grad_norm, expected)


# What cannot be walked twice --------------------------------------------------------------------------------------


def exact(kind: str, module: LightningModule) -> None:
    strategy = SingleDeviceOptimInBwdStrategy(gradient_clipping="exact")
    run = trainer(strategy=strategy, max_steps=2, gradient_clip_val=0.1, gradient_clip_algorithm=kind)
    run.fit(module, loader())


class OwnBackward(Plain):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class DeafBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_backward_overrides() -> None:
    with pytest.raises(RuntimeError, match="walks the graph twice, and the first pass has freed it.*retain_graph=True"):
        exact("norm", DeafBackward())
    exact("value", OwnBackward())  # one pass


def test_plain_backward_where_two_passes_are_needed() -> None:
    net = Net()
    core = OptimizerInBackward(torch.optim.SGD(net.parameters()), clip=("norm", 0.1))
    with core, pytest.raises(RuntimeError, match=r"clip=\('norm', 0.1\)` needs the norm of all gradients before"):
        net(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_limits(value: float) -> None:
    strategy = SingleDeviceOptimInBwdStrategy(gradient_clipping="exact")
    with pytest.raises(ValueError, match=f"limit `{value}`, and only a positive finite number"):
        trainer(strategy=strategy, gradient_clip_val=value).fit(Plain(), loader())


def test_compiled_model() -> None:
    """AOTAutograd gives saved buffers away in backward; with `retain_graph` it must not."""

    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        forward = torch.compile(net, backend="aot_eager")
        core = OptimizerInBackward(optimizer, clip=("norm", 0.05))
        if in_backward:
            core.attach()
        for _ in range(3):
            loss = forward(torch.randn(4, 6)).square().mean()
            if in_backward:
                core.backward(loss)
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        return dict(net.state_dict())

    ours, ordinary = train(True), train(False)
    for name, weight in ordinary.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_donated_buffers_are_explained() -> None:
    """torch before 2.13 refuses `retain_graph` for a compiled graph with these words."""
    net = Net()

    def run(**kwargs: Any) -> None:
        raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires …")

    core = OptimizerInBackward(torch.optim.SGD(net.parameters()), clip=("norm", 0.1))
    with core, pytest.raises(RuntimeError, match="donated_buffer = False` before `torch.compile`"):
        core.backward(net(torch.randn(4, 6)).sum(), run)
