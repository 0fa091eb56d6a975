"""Models built on the meta device: loaded or initialized shard by shard, as the unsharded model would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from helpers import Lit, Net, assert_equal, full, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, sharding
from lightning_bwdopt.loading import initialize, load_pretrained


def save_in_parts(net: nn.Module, folder: Path) -> Path:
    """A checkpoint of several files with an index, as `save_pretrained` writes it."""
    folder.mkdir(exist_ok=True)
    tensors = list(net.state_dict().items())
    index = {}
    for part in range(3):
        file = f"model-0000{part + 1}-of-00003.safetensors"
        save_file(dict(tensors[part::3]), folder / file)
        index.update({name: file for name, _ in tensors[part::3]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


class Rotary(nn.Module):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles


class RotaryNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.rotary(x))


class Ordinary(Lit):
    """Built with data, before sharding."""

    source: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = RotaryNet()
        if self.source:
            load_pretrained(self.net, self.source)
            torch.manual_seed(9)  # the random initialization has drawn numbers here and not below


class NoData(Lit):
    """A buffer that nothing fills."""

    def configure_model(self) -> None:
        self.net.register_buffer("table", torch.empty(3, device="meta"))


class OnMeta(Lit):
    """Built without data: filled after sharding, at random or from a checkpoint."""

    source: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        torch.manual_seed(5)
        with torch.device("meta"):
            self.net = RotaryNet()
        if self.source:
            self.trainer.strategy.shard()
            load_pretrained(self.net, self.source)
            torch.manual_seed(9)
            assert self.net.rotary.angles.is_meta


def fit(make: Any, source: Path | None, **options: Any) -> dict[str, Any]:
    module = seeded(type(make.__name__, (make,), {"source": source}))
    run = trainer(strategy=FSDPOptimInBwdStrategy(**options), devices=2, max_steps=4)
    run.fit(module, loader(ranks=2))
    return {**observables(module, run), "angles": module.net.rotary.angles}


def check_meta(folder: Path) -> None:
    random = fit(Ordinary, None)
    for options in ({}, {"cpu_offload": True}):
        assert_equal(fit(OnMeta, None, **options), random, f"random {options}")
    if dist.get_rank() == 0:
        torch.manual_seed(11)
        save_in_parts(RotaryNet(), folder)
    dist.barrier()
    loaded = fit(Ordinary, folder)
    assert not torch.equal(loaded["losses"][0], random["losses"][0])
    assert_equal(fit(OnMeta, folder), loaded, "loaded")
    torch.manual_seed(11)
    check_load_values(folder, dict(RotaryNet().named_parameters()))
    check_errors(folder)


def check_load_values(folder: Path, first: dict[str, torch.Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            net = RotaryNet().to(dtype)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        sharding.shard(net, sharding.find_blocks(net), mesh=mesh, reshard_after_forward=True)
        load_pretrained(net, folder)
        assert initialize(net) == []
        for name, param in net.named_parameters():
            assert isinstance(param, DTensor)
            assert_equal(full(param), first[name].detach().to(dtype), name)
        net(torch.ones(2, 6, dtype=dtype)).sum().backward()
        assert all(p.grad is not None for p in net.parameters())


def check_errors(folder: Path) -> None:
    with torch.device("meta"):
        net = RotaryNet()
        net.extra = nn.Linear(2, 2)
        wide = Net(depth=1)
        wide.stem = nn.Linear(7, 10)
    # Every rank raises what rank 0 found; none waits for a broadcast.
    with pytest.raises(KeyError, match=r"lacks 2 tensors of the model \(extra.weight, extra.bias\)"):
        load_pretrained(net, folder)
    with pytest.raises(ValueError, match=r"`stem.weight` has shape `\(10, 6\)` in the checkpoint and `\(10, 7\)`"):
        load_pretrained(wide, folder, strict=False)
    run = trainer(strategy=FSDPOptimInBwdStrategy(), devices=2)
    with pytest.raises(RuntimeError, match=r"1 parameters or buffers are on the `meta` device.*`net.table`"):
        run.fit(seeded(NoData), loader(ranks=2))
    with pytest.raises(FileNotFoundError, match="no `.safetensors` file at `.*nothing`, which does not exist"):
        load_pretrained(net, folder / "nothing")
    if dist.get_rank() == 0:
        whole = (folder / "model-00001-of-00003.safetensors").read_bytes()
        (folder / "cut.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="`.*cut.safetensors` cannot be read as safetensors: it is cut short"):
        load_pretrained(net, folder / "cut.safetensors")
    dist.barrier()


def test_meta_models(tmp_path: Path) -> None:
    run_distributed(check_meta, tmp_path)
