"""A compiled model with the mode on: the compiled ordinary run's results, and no compilation after the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import Lit, assert_equal, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy

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
        for core in self.trainer.strategy.optimizers_in_backward:  # type: ignore[attr-defined]
            names = core.parameter_names
            assert [names[id(p)] for p in self.parameters()] == list(without_wrapper(dict(self.named_parameters())))

    def on_train_end(self) -> None:
        torch.compiler.set_stance("default")


def fit(strategy: Any, ranks: int, make: type[Lit], *args: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = seeded(make, *args)
    run = trainer(strategy=strategy, devices=ranks, max_steps=6)
    with torch._inductor.config.patch(compile_threads=1):  # a pool takes longer to start
        run.fit(module, loader(batches=6, ranks=ranks))
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (make is Compiled)
    return observables(module, run)


def without_wrapper(weights: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}


@pytest.mark.parametrize(("how", "backend"), [("blocks in place", "inductor"), ("whole", "aot_eager")])
def test_one_device(how: str, backend: str) -> None:
    ours = fit(SingleDeviceOptimInBwdStrategy(), 1, Compiled, how, backend)
    assert_equal(ours, fit(SingleDeviceOptimInBwdStrategy(enabled=False), 1, Compiled, how, backend))


def check_two_ranks() -> None:
    plain = fit(FSDPOptimInBwdStrategy(), 2, Lit)
    for how in ("blocks in place", "blocks wrapped", "whole"):
        ours = fit(FSDPOptimInBwdStrategy(), 2, Compiled, how)
        assert_equal(ours, fit(FSDPOptimInBwdStrategy(enabled=False), 2, Compiled, how), how)
        assert_equal(without_wrapper(ours["weights"]), plain["weights"], how)  # `aot_eager` runs the same kernels


def test_two_ranks() -> None:
    run_distributed(check_two_ranks)


def check_inductor() -> None:
    ours = fit(FSDPOptimInBwdStrategy(), 2, Compiled, "blocks in place", "inductor")
    assert_equal(ours, fit(FSDPOptimInBwdStrategy(enabled=False), 2, Compiled, "blocks in place", "inductor"))


def test_inductor_on_two_ranks() -> None:
    run_distributed(check_inductor)
