"""Whole tensors on rank 0: right for every layout, and in a number of collectives that goes with the bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from checkpoint_runs import Plain, fit, single
from helpers import assert_equal, run_distributed, seeded
from lightning_bwdopt import states


def collectives(tensors: list[DTensor]) -> tuple[dict[int, torch.Tensor], int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        whole = states.gather(tensors)
    return whole, sum(event.name == "c10d::gather_" for event in profile.events())


def check_gathers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shapes = [(7, 3), (1,), (2, 2, 5), (33,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    kinds = [(shape, dtype) for shape in shapes for dtype in dtypes]
    expected = [(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 9).to(d) for shape, d in kinds]
    shards = [distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1)], src_data_rank=None) for tensor in expected]

    few = collectives(shards[:2])[1]
    whole, count = collectives(shards)
    assert count == few == 1, "one gather for all that fits a bucket"
    if mesh.get_rank() == 0:
        assert_equal([whole[id(tensor)] for tensor in shards], expected)
    else:
        assert whole == {}

    states.BUCKET_BYTES, usual = 64, states.BUCKET_BYTES
    try:
        whole, count = collectives(shards)
    finally:
        states.BUCKET_BYTES = usual
    assert 1 < count < len(shards), "several buckets, of several tensors"
    if mesh.get_rank() == 0:
        assert_equal([whole[id(tensor)] for tensor in shards], expected)

    others = [
        DTensor.from_local(torch.ones(2), mesh, [Replicate()]),
        DTensor.from_local(torch.ones(2), mesh, [Partial()]),
    ]
    whole = states.gather([*others, torch.zeros(2)])
    if mesh.get_rank() == 0:
        assert_equal([whole[id(tensor)] for tensor in others], [torch.ones(2), 2 * torch.ones(2)])
        assert len(whole) == 2


def test_gathers() -> None:
    run_distributed(check_gathers)


def test_names_that_become_one_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    assert set(states.parameter_names(torch.compile(net, backend="eager")).values()) == {"0.weight", "0.bias"}
    net[0]._orig_mod = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"`0.weight` and `0._orig_mod.weight` have one name in a checkpoint"):
        states.parameter_names(net)
    with pytest.raises(ValueError, match="Give the module another"):
        fit(single(), seeded(Collides))


class Collides(Plain):
    """Has a module by the name that `torch.compile` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.net.stem._orig_mod = nn.Linear(6, 10)
