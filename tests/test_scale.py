"""Every FSDP2 option, to the bit, against Lightning's stock strategy with `fully_shard` applied by hand."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers import Block, Lit, Net, assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, checks
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
        ({"tensor_parallel_size": 3}, "times `tensor_parallel_size=3` is 0 ranks, and there are 2"),
        ({"data_parallel_size": 3}, "`data_parallel_size=3` times `tensor_parallel_size=1` is 3 ranks"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, "2 x 2 = 4 ranks, and there are 2"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "there is one node of 2 ranks: nothing would be replicated"),
    ):
        with pytest.raises(ValueError, match=match):
            trainer(strategy=FSDPOptimInBwdStrategy(**options), devices=2).fit(Lit(), loader(ranks=2))
    for policy in ({nn.Conv2d}, lambda module: False):
        with pytest.raises(ValueError, match="matches no module of `Lit`"):
            trainer(strategy=FSDPOptimInBwdStrategy(auto_wrap_policy=policy), devices=2).fit(Lit(), loader(ranks=2))


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


def check_options() -> None:
    check_bad_sizes()
    plain = stock(2, {})
    for name, (mine, of_trainer, theirs) in OPTIONS.items():
        expected = stock(2, of_trainer, **theirs)
        for granularity in ("unit", "parameter"):
            actual = fit(Lit, FSDPOptimInBwdStrategy(granularity=granularity, **mine), 2, **of_trainer)
            assert_equal(actual, expected, f"{name} {granularity}")
        if name in ("SHARD_GRAD_OP", "cpu_offload", "activation_checkpointing"):
            assert_equal(expected, plain, name)
        else:
            assert not torch.equal(expected["weights"]["net.stem.weight"], plain["weights"]["net.stem.weight"])


def test_options_equal_stock() -> None:
    run_distributed(check_options)


def check_four_ranks() -> None:
    check_hybrid()
    check_tensor_parallel()


def check_hybrid() -> None:
    expected = stock(4, {}, hybrid=(2, 2))
    strategy = FSDPOptimInBwdStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(fit(Lit, strategy, 4), expected)
    said = [str(w.message) for w in caught if "saves no memory" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)


class Even(Lit):
    """Without dropout, and with blocks that can be halved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.0)
        for block in self.net.blocks:
            block.inner, block.outer = nn.Linear(10, 8), nn.Linear(8, 10)
        self.batches: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


class TensorParallel(Even):
    """Each block is split over two ranks; the strategy adds the data-parallel sharding."""

    def configure_model(self) -> None:
        for block in self.net.blocks:
            plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


class HandTensorParallel(TensorParallel):
    """The same, sharded by hand."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def check_tensor_parallel() -> None:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    expected = fit(HandTensorParallel, ModelParallelStrategy(**sizes), 4)
    for granularity in ("unit", "parameter"):
        strategy = FSDPOptimInBwdStrategy(granularity=granularity, **sizes)
        assert_equal(fit(TensorParallel, strategy, 4), expected, granularity)

    # Stock cannot clip here (`clip_grad_norm_` fails on several meshes); a plain loop over whole batches can.
    for clip, accumulate in ((None, 1), (0.05, 1), (0.05, 2)):
        module = seeded(TensorParallel)
        options = {} if clip is None else {"gradient_clip_val": clip}
        run = trainer(
            strategy=FSDPOptimInBwdStrategy(gradient_clipping="exact", **sizes),
            devices=4,
            max_steps=4,
            accumulate_grad_batches=accumulate,
            callbacks=[norms := Norms()],
            **options,
        )
        run.fit(module, loader(ranks=2))
        both: list[Any] = [None] * 4
        dist.all_gather_object(both, module.batches)
        assert_equal(both[0], both[1])
        assert_equal(both[2], both[3])
        assert not torch.equal(both[0][0], both[2][0])
        reference, reference_norms = whole_batch_run(both[0], both[2], clip, accumulate)
        torch.testing.assert_close(norms.seen, reference_norms, rtol=1e-5, atol=0)
        for name, weight in module.named_parameters():
            torch.testing.assert_close(full(weight), reference[name].detach(), rtol=0, atol=2e-6)


class Norms(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_start(self, run: Any, module: Any) -> None:
        run.strategy.optimizers_in_backward[0].treatment.sums_norm = True

    def on_before_optimizer_step(self, run: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(run.strategy.optimizers_in_backward[0].grad_norm.clone())


def whole_batch_run(
    first: list[Tensor], second: list[Tensor], clip: float | None, accumulate: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The ordinary optimizer in a plain loop, on the batches of both data-parallel ranks together."""
    module = seeded(Even)
    settings = module.configure_optimizers()
    optimizer, scheduler = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    norms = []
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        x = torch.cat([one, other])
        loss = nn.functional.mse_loss(module.net(x), x.sum(dim=1, keepdim=True).sin())
        (loss / accumulate).backward()
        if number % accumulate == 0:
            limit = float("inf") if clip is None else clip
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), limit))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return dict(module.named_parameters()), norms


def test_hybrid_and_tensor_parallel() -> None:
    run_distributed(check_four_ranks, world_size=4)
