"""A compiled model with the mode on: the compiled ordinary run's results, and no compilation after the first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers import Lit, Net, assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimizerInBackward, SingleDeviceOptimInBwdStrategy
from lightning_bwdopt.sharding import find_blocks, units_of

# torch.compile's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def compile_parts(net: Net, how: str, backend: str) -> None:
    for module in net.blocks if how == "blocks" else [net]:
        module.compile(backend=backend)


class Compiled(Lit):
    """Compiles itself, and allows no compilation after its third batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        compile_parts(self.net, self.how, "aot_eager")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.compiler.set_stance("fail_on_recompile" if batch_idx > 2 else "default")

    def on_train_end(self) -> None:
        torch.compiler.set_stance("default")


def fit(strategy: Any, how: str, ranks: int) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = seeded(Compiled, how)
    run = trainer(strategy=strategy, devices=ranks, max_steps=6)
    run.fit(module, loader(batches=6, ranks=ranks))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return observables(module, run)


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_one_device(how: str) -> None:
    ours = fit(SingleDeviceOptimInBwdStrategy(), how, ranks=1)
    assert_equal(ours, fit(SingleDeviceOptimInBwdStrategy(enabled=False), how, ranks=1))


def check_two_ranks(how: str) -> None:
    ours = fit(FSDPOptimInBwdStrategy(), how, ranks=2)
    assert_equal(ours, fit(FSDPOptimInBwdStrategy(enabled=False), how, ranks=2))


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_two_ranks(how: str) -> None:
    run_distributed(check_two_ranks, how)


def test_inductor_in_a_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # a pool takes longer to start

    def train(in_backward: bool) -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        net = Net(depth=2, dropout=0.0)
        compile_parts(net, "blocks", "inductor")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        core = OptimizerInBackward(optimizer, units_of(net, find_blocks(net)))
        if in_backward:
            core.attach()
        for step in range(5):
            with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                nn.functional.mse_loss(net(torch.full((4, 6), float(step))), torch.ones(4, 1)).backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        return [full(p) for p in net.parameters()], optimizer.state_dict()["state"]

    assert_equal(train(in_backward=True), train(in_backward=False))
