"""Meshes of two dimensions on four ranks, hybrid sharding and tensor parallelism: training, checkpoints, loading."""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import test_checkpoints
from helpers import Lit, Net, assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, load_pretrained
from test_loading import save_in_parts
from test_models import Lines
from test_scale import fit, stock

hybrid = partial(FSDPOptimInBwdStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
tensor_parallel = partial(FSDPOptimInBwdStrategy, tensor_parallel_size=2)


even_net = partial(Net, dropout=0.0, hidden=8)  # its blocks can be halved


def split_blocks(net: Net, mesh: Any) -> None:
    for block in net.blocks:
        parallelize_module(block, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})


class Even(Lit):
    """Keeps the batches that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = even_net()
        self.batches: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


class TensorParallel(Even):
    """Each block is split over two ranks; the strategy adds the data-parallel sharding."""

    def configure_model(self) -> None:
        split_blocks(self.net, self.device_mesh["tensor_parallel"])


class HandTensorParallel(TensorParallel):
    """The same, sharded by hand."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def check_hybrid() -> None:
    expected = stock(4, {}, hybrid=(2, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(fit(Lit, hybrid(), 4), expected)
        trainer(strategy=hybrid(), devices=4).validate(seeded(Lit), loader(1, ranks=4), verbose=False)
    said = [str(w.message) for w in caught if "saves no memory" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    check_norms(Even, hybrid, [0, 1, 2, 3], [(0.05, 1)])

    # The sizes are those of the nodes: here two of two ranks each, as `torchrun` tells it.
    node, local_rank = divmod(dist.get_rank(), 2)
    as_on_two_nodes = {"GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, as_on_two_nodes):
        module = seeded(Lit)
        strategy = FSDPOptimInBwdStrategy(sharding_strategy="HYBRID_SHARD")
        run = trainer(strategy=strategy, num_nodes=2, devices=2, max_steps=4)
        run.fit(module, loader(ranks=4))
    assert module.net.stem.weight.device_mesh.shape == (2, 2)
    assert_equal(observables(module, run), expected, "sizes of the nodes")


def check_tensor_parallel() -> None:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    expected = fit(HandTensorParallel, ModelParallelStrategy(**sizes), 4)
    for granularity in ("unit", "parameter"):
        assert_equal(fit(TensorParallel, tensor_parallel(granularity=granularity), 4), expected, granularity)
    low = {"precision": "bf16-true"}
    expected = fit(HandTensorParallel, ModelParallelStrategy(**sizes), 4, **low)
    assert_equal(fit(TensorParallel, tensor_parallel(), 4, **low), expected, "bf16-true")
    check_norms(TensorParallel, tensor_parallel, [0, 0, 1, 1], [(None, 1), (0.05, 1), (0.05, 2)])


def test_training_on_four_ranks() -> None:
    run_distributed(check_training, world_size=4)


def check_training() -> None:
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero.addHandler(lines := Lines())
    check_hybrid()
    check_tensor_parallel()
    rank_zero.removeHandler(lines)
    if dist.get_rank() == 0:
        assert lines.said.count("4 units: 3 x Block (177 parameters each), Lit (81).") == 2
        assert "4 units: 3 x Block (198 parameters each), Even (81)." in lines.said
        assert "4 units: 3 x Block (198 parameters each), TensorParallel (81)." in lines.said


# The gradient norm and clipping -------------------------------------------------------------------------------------


def check_norms(make: type[Even], strategy: Any, data_ranks: list[int], cases: list[tuple[float | None, int]]) -> None:
    """Against a plain loop over whole batches: stock cannot clip on several meshes (`clip_grad_norm_` fails)."""
    for clip, accumulate in cases:
        module = seeded(make)
        options = {} if clip is None else {"gradient_clip_val": clip}
        run = trainer(
            strategy=strategy(gradient_clipping="exact"),
            devices=4,
            max_steps=4,
            accumulate_grad_batches=accumulate,
            callbacks=[norms := Norms()],
            **options,
        )
        run.fit(module, loader(ranks=len(set(data_ranks))))
        seen: list[Any] = [None] * 4
        dist.all_gather_object(seen, module.batches)
        for rank, data_rank in enumerate(data_ranks):
            assert_equal(seen[rank], seen[data_ranks.index(data_rank)])
        parts = [seen[data_ranks.index(data_rank)] for data_rank in sorted(set(data_ranks))]
        assert len({part[0].sum().item() for part in parts}) == len(parts)
        reference, reference_norms = whole_batch_run(parts, clip, accumulate)
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
    parts: list[list[Tensor]], clip: float | None, accumulate: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The ordinary optimizer in a plain loop, on the batches of all data-parallel ranks together."""
    module = seeded(Even)
    settings = module.configure_optimizers()
    optimizer, scheduler = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    norms = []
    for number, batches in enumerate(zip(*parts, strict=True), start=1):
        x = torch.cat(batches)
        loss = nn.functional.mse_loss(module.net(x), x.sum(dim=1, keepdim=True).sin())
        (loss / accumulate).backward()
        if number % accumulate == 0:
            limit = float("inf") if clip is None else clip
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), limit))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return dict(module.named_parameters()), norms


# Checkpoints --------------------------------------------------------------------------------------------------------


class Saved(test_checkpoints.Plain):
    """As in test_checkpoints.py, with blocks that can be halved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = even_net()


class SavedTensorParallel(Saved):
    def configure_model(self) -> None:
        split_blocks(self.net, self.device_mesh["tensor_parallel"])


WAYS: dict[str, tuple[Any, Any]] = {
    "hybrid": (Saved, hybrid),
    "tensor_parallel": (SavedTensorParallel, tensor_parallel),
}


def check_saving(tmp: str) -> None:
    for name, (make, strategy) in WAYS.items():
        unbroken = test_checkpoints.fit(strategy(enabled=False), seeded(make), ranks=4, save=f"{tmp}/{name}_full")
        sharded = strategy(state_dict_type="sharded")
        assert_equal(test_checkpoints.fit(sharded, seeded(make), ranks=4, save=f"{tmp}/{name}_sharded"), unbroken, name)
        written = sorted(path.name for path in Path(f"{tmp}/{name}_sharded").glob("*.distcp"))
        assert written == [f"__{rank}_0.distcp" for rank in range(4)]
        for kind in ("full", "sharded"):
            resumed = test_checkpoints.fit(strategy(), seeded(make), ranks=4, resume=f"{tmp}/{name}_{kind}")
            assert_equal(resumed, unbroken, f"{name}, {kind}")
        if dist.get_rank() == 0:
            torch.save(unbroken, f"{tmp}/{name}")


def check_reading(tmp: str) -> None:
    """On two ranks. All ranks see the same batches, so the means of gradients are the same on two and on four."""
    unbroken = {name: torch.load(f"{tmp}/{name}", weights_only=True) for name in WAYS}
    for kind in ("full", "sharded"):
        for name, size in (("hybrid", 1), ("tensor_parallel", 2)):
            strategy = FSDPOptimInBwdStrategy(tensor_parallel_size=size)
            module = seeded(WAYS[name][0])
            resumed = test_checkpoints.fit(strategy, module, ranks=2, resume=f"{tmp}/{name}_{kind}")
            assert_equal(resumed, unbroken[name], f"{name}, {kind}")
        # Split layers add up in another order: the same state to start from, and nearly the same steps.
        path = f"{tmp}/tensor_parallel_{kind}"
        other = test_checkpoints.fit(FSDPOptimInBwdStrategy(), seeded(Saved), ranks=2, resume=path)
        torch.testing.assert_close(other["weights"], unbroken["tensor_parallel"]["weights"], rtol=0, atol=2e-6)


def test_checkpoints_on_four_ranks(tmp_path: Path) -> None:
    run_distributed(check_saving, str(tmp_path), world_size=4)
    run_distributed(check_reading, str(tmp_path))


# Models on the meta device ------------------------------------------------------------------------------------------


class Empty(Even):
    """Built without data: filled after sharding, at random or from a checkpoint."""

    source: Path | None = None
    splits = False

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = even_net()
        if self.splits:
            split_blocks(self.net, self.device_mesh["tensor_parallel"])
        self.trainer.strategy.shard()
        torch.manual_seed(5)
        if self.source:
            load_pretrained(self.net, self.source)


def check_meta(folder: Path) -> None:
    torch.manual_seed(5)
    random, loaded = even_net(), even_net()
    if dist.get_rank() == 0:
        save_in_parts(loaded, folder)
    dist.barrier()
    for strategy, splits in ((hybrid, False), (tensor_parallel, True)):
        for source, expected in ((None, random), (folder, loaded)):
            module = seeded(type("Empty", (Empty,), {"source": source, "splits": splits}))
            run = trainer(strategy=strategy(), devices=4, max_steps=1)
            run.fit(module, loader(ranks=4))  # a warm-up step at rate 0: trains nothing
            values = {name: full(param) for name, param in module.net.named_parameters()}
            assert_equal(values, {name: param.detach() for name, param in expected.named_parameters()})


def test_meta_models_on_four_ranks(tmp_path: Path) -> None:
    run_distributed(check_meta, tmp_path, world_size=4)
