"""Whole tensors on rank 0: right for every layout, and in a number of collectives that goes with the bytes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers import assert_equal, run_distributed
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
