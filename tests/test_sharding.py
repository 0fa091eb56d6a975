"""The finder of blocks, and the units that come of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from helpers import Block, Net, run_distributed
from lightning_bwdopt import sharding


def names(root: nn.Module, blocks: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in root.named_modules()}
    return [known[id(block)] for block in blocks]


def test_finds_repeated_blocks() -> None:
    net = Net()
    assert names(net, sharding.find_blocks(net)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_finds_the_outermost_of_nested_lists() -> None:
    root = nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))})
    assert names(root, sharding.find_blocks(root)) == ["stages.0", "stages.1"]


def test_mixed_and_parameterless_lists_are_no_blocks() -> None:
    root = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.ReLU(), nn.ReLU()])])
    assert sharding.find_blocks(root) == []


def test_blocks_that_share_a_parameter_stay_with_the_rest() -> None:
    net = Net()
    net.blocks[0].inner.weight = net.blocks[2].inner.weight
    assert names(net, sharding.find_blocks(net)) == ["blocks.1"]


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        lambda module: isinstance(module, Block),
        ModuleWrapPolicy({Block}),
        partial(size_based_auto_wrap_policy, min_num_params=170),
    ],
    ids=["classes", "callable", "wrap_policy", "size"],
)
def test_policies(policy: object) -> None:
    net = Net()
    assert names(net, sharding.find_blocks(net, policy)) == ["blocks.0", "blocks.1", "blocks.2"]  # type: ignore[arg-type]


def test_policy_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"matches no module of `Net`.*Block"):
        sharding.find_blocks(Net(), {nn.Conv2d})
    with pytest.raises(TypeError, match="has the entry `'Block'`"):
        sharding.find_blocks(Net(), {"Block"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation_checkpointing_policy.*matches no module"):
        sharding.checkpoint_activations(Net(), {nn.Conv2d})


def test_units_on_one_device_cover_each_parameter_once() -> None:
    net = Net()
    units = sharding.units_of(net, sharding.find_blocks(net))
    flat = [id(p) for unit in units for p in unit]
    assert sorted(flat) == sorted(id(p) for p in net.parameters())
    assert {id(p) for p in net.blocks[0].parameters()} in [{id(p) for p in unit} for unit in units]


def check_shard() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    net = Net()
    sharding.shard(net, sharding.find_blocks(net), mesh=mesh, reshard_after_forward=True)
    assert names(net, [m for m in net.modules() if isinstance(m, FSDPModule)]) == [
        "",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    units = sharding.units_of(net)
    assert [len(unit) for unit in units] == [6, 6, 6, 4]
    assert sum(len(unit) for unit in units) == len(list(net.parameters()))
    net.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match="`scale` is 0-dimensional"):
        sharding.shard(net, [], mesh=mesh, reshard_after_forward=True)


def test_shard() -> None:
    run_distributed(check_shard)
