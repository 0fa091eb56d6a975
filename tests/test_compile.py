"""A compiled model with the mode on: the compiled ordinary run's results, and no compilation after the first step."""

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


class Compiled(Lit):
    """Compiles itself, and allows no compilation after its first batch."""

    def __init__(self, how: str, backend: str = "aot_eager") -> None:
        super().__init__()
        self.how = how
        self.backend = backend

    def configure_model(self) -> None:
        if self.how == "whole":
            self.net = torch.compile(self.net, backend=self.backend)
            return
        for index, block in enumerate(self.net.blocks):
            if self.how == "blocks in place":
                block.compile(backend=self.backend)
            else:
                self.net.blocks[index] = torch.compile(block, backend=self.backend)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.compiler.set_stance("fail_on_recompile" if batch_idx > 0 else "default")

    def on_train_end(self) -> None:
        torch.compiler.set_stance("default")


def fit(strategy: Any, ranks: int, make: type[Lit], *args: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = seeded(make, *args)
    run = trainer(strategy=strategy, devices=ranks, max_steps=6)
    run.fit(module, loader(batches=6, ranks=ranks))
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (make is Compiled)
    return observables(module, run)


def without_wrapper(weights: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}


@pytest.mark.parametrize("how", ["blocks in place", "whole"])
def test_one_device(how: str) -> None:
    ours = fit(SingleDeviceOptimInBwdStrategy(), 1, Compiled, how)
    assert_equal(ours, fit(SingleDeviceOptimInBwdStrategy(enabled=False), 1, Compiled, how))


def check_two_ranks() -> None:
    plain = fit(FSDPOptimInBwdStrategy(), 2, Lit)
    for how in ("blocks in place", "blocks wrapped", "whole"):
        ours = fit(FSDPOptimInBwdStrategy(), 2, Compiled, how)
        assert_equal(ours, fit(FSDPOptimInBwdStrategy(enabled=False), 2, Compiled, how), how)
        assert_equal(without_wrapper(ours["weights"]), plain["weights"], how)  # `aot_eager` runs the same kernels


def test_two_ranks() -> None:
    run_distributed(check_two_ranks)


def check_inductor() -> None:
    torch._inductor.config.compile_threads = 1  # a pool takes longer to start
    ours, ordinary = (
        fit(FSDPOptimInBwdStrategy(enabled=enabled), 2, Compiled, "blocks in place", "inductor")
        for enabled in (True, False)
    )
    assert_equal(ours, ordinary)


def test_inductor_on_two_ranks() -> None:
    run_distributed(check_inductor)


def test_inductor_in_a_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)

    def train(in_backward: bool) -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        net = Net(depth=2, dropout=0.0)
        for block in net.blocks:
            block.compile()
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
