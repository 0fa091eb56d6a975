"""The finder of blocks, and the units that come of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from helpers import Block, Net, run_distributed
from lightning_bwdopt import sharding
from lightning_bwdopt.policies import WrapPolicy
from lightning_bwdopt.units import describe_units, named_units, units_of


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
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        CustomPolicy(lambda module: isinstance(module, Block)),
    ],
    ids=["classes", "callable", "wrap_policy", "size", "transformer", "lambda", "custom"],
)
def test_policies(policy: object) -> None:
    net = Net()
    assert names(net, sharding.find_blocks(net, policy)) == ["blocks.0", "blocks.1", "blocks.2"]  # type: ignore[arg-type]


def test_policies_nest_and_skip_what_cannot_be_called() -> None:
    net = Net()
    every = names(net, sharding.find_blocks(net, always_wrap_policy))
    assert every == [name for name, module in net.named_modules() if name and name != "blocks" and name != "dropout"]
    # Counted without what is wrapped already: 177 elements in each block, none left for the list around them.
    sizes = partial(size_based_auto_wrap_policy, min_num_params=100)
    assert names(net, sharding.find_blocks(net, sizes)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_lists_in_lists() -> None:
    """A list cannot be gathered: nothing calls it."""
    root = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert names(root, sharding.find_blocks(root)) == ["0.0", "0.1", "1.0", "1.1"]
    flat = nn.Sequential(*(Block() for _ in range(3)))
    assert names(flat, sharding.find_blocks(flat)) == ["0", "1", "2"]


def test_torch_transformer() -> None:
    with torch.device("meta"):
        model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    layers = [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)]
    assert names(model, sharding.find_blocks(model)) == layers


TINY = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "Llama": (
        "LlamaForCausalLM",
        {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ["model.layers.0", "model.layers.1"],
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        ["transformer.h.0", "transformer.h.1"],
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2},
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "ViT": (
        "ViTForImageClassification",
        {**TINY, "image_size": 16, "patch_size": 8},
        ["vit.embeddings", "vit.layers.0", "vit.layers.1"],
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        {**TINY, "num_key_value_heads": 2, "num_local_experts": 2},
        ["model.layers.0", "model.layers.1"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings, expected = MODELS[name]
    settings = {key: value for key, value in settings.items() if name != "ViT" or key != "vocab_size"}
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**settings))
    blocks = sharding.find_blocks(model)
    assert names(model, blocks) == expected
    units = units_of(model, blocks)
    params = [id(p) for unit in units for p in unit]
    assert sorted(params) == sorted(id(p) for p in model.parameters())


def test_units_are_described_with_their_sizes() -> None:
    net = Net()
    told = describe_units(named_units(net, sharding.find_blocks(net)))
    assert told == "5 units: 3 x Block (177 parameters each), Linear (70), Linear (11)"
    big = nn.Linear(1000, 200, bias=False, device="meta")
    assert describe_units(named_units(big)) == "1 unit: Linear (0.2 M)"


def test_policy_that_matches_nothing() -> None:
    options = CustomPolicy(lambda module: {"reshard_after_forward": False} if isinstance(module, Block) else False)
    with pytest.raises(ValueError, match="returns the FSDP1 arguments `{'reshard_after_forward': False}`"):
        sharding.find_blocks(Net(), options)
    with pytest.raises(ValueError, match=r"matches no module of `Net`.*Block"):
        sharding.find_blocks(Net(), {nn.Conv2d})
    with pytest.raises(TypeError, match="has the entry `'Block'`"):
        sharding.find_blocks(Net(), {"Block"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation_checkpointing_policy.*matches no module"):
        sharding.checkpoint_activations(Net(), {nn.Conv2d})
    with pytest.raises(TypeError, match="`activation_checkpointing_policy` has the entry `'Block'`"):
        sharding.checkpoint_activations(Net(), {"Block"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [{Block}, lambda module: isinstance(module, Block), ModuleWrapPolicy({Block})],
    ids=["classes", "callable", "wrap_policy"],
)
def test_activations_of_chosen_modules_are_recomputed(policy: WrapPolicy) -> None:
    net, called = Net(), []
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, _: called.append(module))
    sharding.checkpoint_activations(net, policy)
    net(torch.randn(2, 6)).sum().backward()
    assert [called.count(net.stem), called.count(net.head)] == [1, 1]
    assert all(called.count(layer) == 2 for block in net.blocks for layer in (block.inner, block.outer))


def test_units_on_one_device_cover_each_parameter_once() -> None:
    net = Net()
    units = units_of(net, sharding.find_blocks(net))
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
    units = units_of(net)
    assert [len(unit) for unit in units] == [6, 6, 6, 4]
    assert sum(len(unit) for unit in units) == len(list(net.parameters()))
    net.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match="`scale` is 0-dimensional"):
        sharding.shard(net, [], mesh=mesh, reshard_after_forward=True)
    net = Net()
    net.blocks[1].none = nn.Linear(0, 2, bias=False)
    with pytest.raises(ValueError, match="`blocks.1.none.weight` has no elements.*freeze it"):
        sharding.shard(net, [], mesh=mesh, reshard_after_forward=True)
    net.blocks[1].none.requires_grad_(False)
    sharding.shard(net, [], mesh=mesh, reshard_after_forward=True)
    net(torch.ones(2, 6)).sum().backward()


def test_shard() -> None:
    run_distributed(check_shard)
