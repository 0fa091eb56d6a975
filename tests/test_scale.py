"""Every FSDP2 option, to the bit, against Lightning's stock strategy with `fully_shard` applied by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from helpers import Block, Lit, Net, assert_equal, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, checks
from lightning_bwdopt.sharding import find_blocks
from lightning_bwdopt.views import shard_like


class Stock(Lit):
    """What a user of the stock strategy writes; the options are `fully_shard`'s."""

    options: ClassVar[dict[str, Any]] = {}
    hybrid: ClassVar[tuple[int, int] | None] = None
    recompute = False

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        if self.hybrid:
            mesh = init_device_mesh("cpu", self.hybrid, mesh_dim_names=("replicate", "shard"))
        if self.trainer.precision == "bf16-true":
            self.net.bfloat16()
        for block in self.net.blocks:
            if self.recompute:
                checkpoint(block)
            fully_shard(block, mesh=mesh, **self.options)
        fully_shard(self.net, mesh=mesh, **self.options)


def stock(world_size: int, trainer_options: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return fit(type("Stock", (Stock,), attributes), strategy, world_size, **trainer_options)


def fit(make: type[LightningModule], strategy: Any, devices: int, **kwargs: Any) -> dict[str, Any]:
    module = seeded(make)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(**{"strategy": strategy, "devices": devices, "max_steps": 4, **kwargs})
    run.fit(module, loader(ranks=devices))
    seen = observables(module, run)
    for name, weight in seen["weights"].items():
        if weight.dtype == torch.float32 or weight.ndim > 1:  # a bf16 norm weight of 1 stays where it is for long
            assert not torch.equal(weight, start[name].to(weight.dtype)), f"`{name}` did not train"
    return seen


BF16 = torch.bfloat16
# name -> (options of our strategy, of the Trainer, of the stock run)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "FULL_SHARD": ({}, {}, {}),
    "SHARD_GRAD_OP": (
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {},
        {"options": {"reshard_after_forward": False}},
    ),
    "cpu_offload": (
        {"cpu_offload": True},
        {},
        {"options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    ),
    "bf16-mixed": (
        {},
        {"precision": "bf16-mixed"},
        {"options": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}},
    ),
    "mp_policy": (
        {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "torch.bfloat16"}},
        {},
        {"options": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)}},
    ),
    "bf16-true": ({}, {"precision": "bf16-true"}, {}),
    "activation_checkpointing": ({"activation_checkpointing_policy": {Block}}, {}, {"recompute": True}),
}


def check_bad_sizes() -> None:
    for options, match in (
        ({"tensor_parallel_size": 3}, "times `tensor_parallel_size=3` is 3 ranks, and the world size is 2"),
        ({"data_parallel_size": 3}, "`data_parallel_size=3` times `tensor_parallel_size=1` is 3 ranks"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, "2 x 2 = 4 ranks, and there are 2"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "there is one node of 2 ranks: nothing would be replicated"),
    ):
        with pytest.raises(ValueError, match=match):
            trainer(strategy=FSDPOptimInBwdStrategy(**options), devices=2).fit(Lit(), loader(ranks=2))
    for policy in ({nn.Conv2d}, lambda module: False):
        with pytest.raises(ValueError, match="matches no module of `Lit`"):
            trainer(strategy=FSDPOptimInBwdStrategy(auto_wrap_policy=policy), devices=2).fit(Lit(), loader(ranks=2))


def test_sizes_that_are_none() -> None:
    for options, error, match in (
        ({"tensor_parallel_size": "auto"}, TypeError, "`tensor_parallel_size='auto'` is not a whole number"),
        ({"data_parallel_size": "2"}, TypeError, "`data_parallel_size='2'` is not a whole number"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": 4}, ValueError, "`device_mesh=4` is not a pair"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": ("2", "2")}, ValueError, "is not a pair of positive"),
    ):
        with pytest.raises(error, match=match):
            FSDPOptimInBwdStrategy(**options)
    with pytest.raises(TypeError, match="`auto_wrap_policy` is the class `Block`. Pass a set of classes, `{Block}`"):
        find_blocks(Net(), Block)


def test_options_that_need_a_machine() -> None:
    checks.check_offload(torch.device("cpu"), "2.11.0")
    checks.check_offload(torch.device("cuda", 0), "2.13.0+cu130")
    with pytest.raises(ValueError, match="would need a mesh of three dimensions"):
        FSDPOptimInBwdStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), tensor_parallel_size=2)


def test_state_of_an_offloaded_parameter_stays_on_the_host() -> None:
    """A mesh of GPUs and shards on the host: what `cpu_offload` is on a GPU, as far as a CPU can show it."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    local = torch.arange(3.0)
    meta = TensorMeta(torch.Size([3]), (1,), torch.float32)
    param = DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    state = shard_like(torch.zeros(3), param)
    assert state.device == torch.device("cpu")
    assert (state.shape, state.placements, state.device_mesh) == (param.shape, param.placements, mesh)


def check_options(names: list[str], granularities: list[str]) -> None:
    ranks = dist.get_world_size()
    plain = stock(ranks, {})
    for name in names:
        mine, of_trainer, theirs = OPTIONS[name]
        expected = stock(ranks, of_trainer, **theirs)
        for granularity in granularities:
            actual = fit(Lit, FSDPOptimInBwdStrategy(granularity=granularity, **mine), ranks, **of_trainer)
            assert_equal(actual, expected, f"{name} {granularity}")
        if name in ("FULL_SHARD", "SHARD_GRAD_OP", "cpu_offload", "activation_checkpointing"):
            assert_equal(expected, plain, name)
        else:
            assert not torch.equal(expected["weights"]["net.stem.weight"], plain["weights"]["net.stem.weight"])


def test_options_equal_stock() -> None:
    run_distributed(check_bad_sizes)
    run_distributed(check_options, [*OPTIONS], ["unit", "parameter"])


def test_options_equal_stock_on_three_ranks() -> None:
    """Uneven shards: a block's layers of 7 and 10 rows, and a head of one row, of which two ranks have nothing."""
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "cpu_offload", "bf16-mixed"]
    run_distributed(check_options, names, ["unit"], world_size=3)
