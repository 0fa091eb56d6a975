"""Checkpoints both ways: what is written, resuming, and interchange with Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader

from checkpoint_runs import (
    HALF,
    LAYERS,
    HandSharded,
    Mixed,
    Plain,
    adafactor,
    ddp,
    fit,
    lion,
    ours,
    read,
    schedule_free,
    sgd,
    sgd_with_momentum,
    single,
    stock,
)
from helpers import assert_equal, loader, run_distributed, seeded
from lightning_bwdopt import states

# Two ranks ----------------------------------------------------------------------------------------------------------


def check_interchange(tmp: str, kind: str) -> None:
    def run(strategy: Strategy, module: type[Plain], **kwargs: Any) -> dict[str, Any]:
        # Other data on each rank, and in another order in each epoch.
        data = DataLoader(loader(HALF, ranks=2).dataset, batch_size=4, shuffle=True)
        return fit(strategy, seeded(module), ranks=2, use_distributed_sampler=True, data=data, **kwargs)

    whole = run(stock(kind), HandSharded, save=f"{tmp}/stock")
    assert_equal(run(ours(kind), Plain, save=f"{tmp}/ours"), whole)
    assert_equal(run(ours(kind), Mixed, save=f"{tmp}/mixed"), whole)
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    assert_equal(read(f"{tmp}/mixed", without_manual_counter=True), read(f"{tmp}/stock", without_manual_counter=True))
    for source in ("stock", "ours", "mixed"):
        path = f"{tmp}/{source}"
        assert_equal(run(stock(kind), HandSharded, resume=path), whole, f"{source} -> stock")
        assert_equal(run(ours(kind), Plain, resume=path), whole, f"{source} -> ours")
        assert_equal(run(ours(kind), Mixed, resume=path), whole, f"{source} -> mixed")
        assert_equal(run(ours(kind, granularity="parameter"), Plain, resume=path), whole, f"{source} -> by parameter")
    assert_equal(run(ours(enabled=False), Mixed, resume=f"{tmp}/mixed"), whole, "mixed -> mode off")


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_two_ranks_interchange(tmp_path: Path, kind: str) -> None:
    run_distributed(check_interchange, str(tmp_path), kind)


def check_optimizer(tmp: str, make: Callable[..., Any], kind: str, stock_loads: bool) -> None:
    whole = fit(stock(kind), seeded(HandSharded, make), ranks=2, save=f"{tmp}/stock")
    assert_equal(fit(ours(kind), seeded(Plain, make), ranks=2, save=f"{tmp}/ours"), whole)
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    for source in ("stock", "ours"):
        path = f"{tmp}/{source}"
        assert_equal(fit(ours(kind), seeded(Plain, make), ranks=2, resume=path), whole, f"{source} -> ours")
        if stock_loads:
            assert_equal(fit(stock(kind), seeded(HandSharded, make), ranks=2, resume=path), whole, f"{source} -> stock")
    if kind == "full":
        assert_equal(fit(ddp(), seeded(Plain, make), ranks=2, save=f"{tmp}/ddp"), whole)
        assert_equal(fit(ours(), seeded(Plain, make), ranks=2, resume=f"{tmp}/ddp"), whole, "ddp -> ours")
        assert_equal(fit(ddp(), seeded(Plain, make), ranks=2, resume=f"{tmp}/ours"), whole, "ours -> ddp")


@pytest.mark.parametrize(
    ("make", "stock_loads"),
    [(sgd, False), (sgd_with_momentum, True), (lion, True), (schedule_free, False)],
)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_optimizers_on_two_ranks(tmp_path: Path, make: Any, stock_loads: bool, kind: str) -> None:
    run_distributed(check_optimizer, str(tmp_path), make, kind, stock_loads)


def check_variant(tmp: str, variant: str, kind: str) -> None:
    whole = fit(stock(kind), seeded(HandSharded, variant=variant), ranks=2, save=f"{tmp}/stock")
    assert_equal(fit(ours(kind), seeded(Plain, variant=variant), ranks=2, save=f"{tmp}/ours"), whole)
    assert_equal(read(f"{tmp}/ours"), read(f"{tmp}/stock"))
    assert not any("_orig_mod" in name for name in read(f"{tmp}/ours")["state_dict"])
    for source in ("stock", "ours"):
        resumed = fit(ours(kind), seeded(Plain, variant=variant), ranks=2, resume=f"{tmp}/{source}")
        assert_equal(resumed, whole, f"{source} -> ours")
    # Stock cannot load its own checkpoints of the other variants, or goes on with other values or another order.
    if variant in ("frozen", "frozen group", "tied"):
        resumed = fit(stock(kind), seeded(HandSharded, variant=variant), ranks=2, resume=f"{tmp}/ours")
        assert_equal(resumed, whole, "ours -> stock")


@pytest.mark.parametrize("variant", [*LAYERS, "compiled"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_layers_on_two_ranks(tmp_path: Path, variant: str, kind: str) -> None:
    run_distributed(check_variant, str(tmp_path), variant, kind)


# One device, and across strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd, sgd_with_momentum, lion, schedule_free, adafactor])
def test_one_device_interchange(tmp_path: Path, make: Any) -> None:
    whole = fit(single(enabled=False), seeded(Plain, make), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, make), save=tmp_path / "ours"), whole)
    assert_equal(fit(single(), seeded(Mixed, make), save=tmp_path / "mixed"), whole)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "stock"))
    for source in ("stock", "ours", "mixed"):
        path = tmp_path / source
        assert_equal(fit(single(enabled=False), seeded(Plain, make), resume=path), whole, f"{source} -> stock")
        assert_equal(fit(single(), seeded(Plain, make), resume=path), whole, f"{source} -> ours")
        assert_equal(
            fit(single(granularity="parameter"), seeded(Mixed, make), resume=path), whole, f"{source} -> mixed"
        )


@pytest.mark.parametrize("variant", LAYERS)
def test_layers_on_one_device(tmp_path: Path, variant: str) -> None:
    whole = fit(single(enabled=False), seeded(Plain, variant=variant), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, variant=variant), save=tmp_path / "ours"), whole)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "stock"))
    for source in ("stock", "ours"):
        for enabled in (True, False):
            resumed = fit(single(enabled), seeded(Plain, variant=variant), resume=tmp_path / source)
            assert_equal(resumed, whole, f"{source} -> {'ours' if enabled else 'stock'}")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
def test_compiled_layers_on_one_device(tmp_path: Path) -> None:
    """Lightning's own strategy writes `_orig_mod` here, which no model can load that is compiled otherwise."""
    whole = fit(single(enabled=False), seeded(Plain, variant="compiled"), save=tmp_path / "stock")
    assert_equal(fit(single(), seeded(Plain, variant="compiled"), save=tmp_path / "ours"), whole)
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "stock")
    assert not any("_orig_mod" in name for name in ours["state_dict"])
    theirs["state_dict"] = {states.clean_name(name): value for name, value in theirs["state_dict"].items()}
    assert_equal(ours, theirs)
    for source in ("stock", "ours"):
        resumed = fit(single(), seeded(Plain, variant="compiled"), resume=tmp_path / source)
        assert_equal(resumed, whole, f"{source} -> ours")
    plain = fit(single(enabled=False), seeded(Plain), resume=tmp_path / "ours")
    assert_equal(plain["losses"], whole["losses"], "compiled -> stock, not compiled")
    assert_equal(fit(single(), seeded(Plain), resume=tmp_path / "stock"), plain, "compiled -> ours, not compiled")


def check_two_ranks_from_one(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for source in ("stock", "ours"):
        assert_equal(fit(ours(), seeded(Plain), ranks=2, resume=f"{tmp}/{source}"), whole, source)
    assert_equal(fit(ddp(), seeded(Plain), ranks=2, save=f"{tmp}/ddp"), whole)
    assert_equal(fit(ours(), seeded(Mixed), ranks=2, resume=f"{tmp}/ddp"), whole, "ddp")
    fit(ours(), seeded(Plain), ranks=2, save=f"{tmp}/full")
    fit(ours("sharded"), seeded(Plain), ranks=2, save=f"{tmp}/sharded")
    assert_equal(fit(ddp(), seeded(Plain), ranks=2, resume=f"{tmp}/full"), whole, "full -> ddp")


def check_one_rank(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for kind in ("full", "sharded"):
        assert_equal(fit(ours(), seeded(Plain), resume=f"{tmp}/{kind}"), whole, kind)
        fit(ours(kind), seeded(Plain), save=f"{tmp}/one_{kind}")


def check_two_ranks_again(tmp: str) -> None:
    whole = torch.load(f"{tmp}/whole", weights_only=True)
    for kind in ("full", "sharded"):
        assert_equal(fit(ours(), seeded(Plain), ranks=2, resume=f"{tmp}/one_{kind}"), whole, kind)


def check_three_ranks(tmp: str) -> None:
    expected = None
    for kind in ("full", "sharded"):
        hand = ModelParallelStrategy(3, 1, save_distributed_checkpoint=kind == "sharded")
        stock_run = fit(hand, seeded(HandSharded), ranks=3, resume=f"{tmp}/{kind}")
        expected = expected or stock_run
        assert_equal(stock_run, expected)
        assert_equal(fit(ours(), seeded(Plain), ranks=3, resume=f"{tmp}/{kind}"), expected, kind)


def test_across_strategies_and_world_sizes(tmp_path: Path) -> None:
    whole = fit(single(enabled=False), seeded(Plain), save=tmp_path / "stock")
    fit(single(), seeded(Mixed), save=tmp_path / "ours")
    torch.save(whole, tmp_path / "whole")
    run_distributed(check_two_ranks_from_one, str(tmp_path))
    assert_equal(fit(single(enabled=False), seeded(Plain), resume=tmp_path / "full"), whole, "two ranks -> stock")
    for kind in ("full", "sharded"):
        assert_equal(fit(single(), seeded(Plain), resume=tmp_path / kind), whole, f"{kind} -> one device")
    run_distributed(check_one_rank, str(tmp_path), world_size=1)
    run_distributed(check_two_ranks_again, str(tmp_path))
    run_distributed(check_three_ranks, str(tmp_path), world_size=3)
