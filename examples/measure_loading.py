"""Host memory of building a sharded model from a checkpoint: on the meta device, and as a whole on every rank.

``python -m examples.measure_loading`` writes a random checkpoint of SmolLM2-135M's shape (fp32, 538 MB, several files),
builds it on four gloo ranks in three ways, and prints the peak of what each rank's resident set grows by. Linux only.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from lightning_bwdopt import sharding
from lightning_bwdopt.loading import initialize, load_pretrained
from lightning_bwdopt.memory import MIB
from lightning_bwdopt.process_memory import memory_reader, peak, restart_peak

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
WAYS = {
    "meta": "meta device, `load_pretrained`",
    "mapped": "`from_pretrained` on every rank (maps the files), then sharded",
    "whole": "built with data on every rank, then sharded",
}


def build(way: str, folder: str) -> torch.nn.Module:
    """The sharded model, with the checkpoint's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "mapped":
        model: Any = LlamaForCausalLM.from_pretrained(folder)
    else:
        torch.manual_seed(0)
        with torch.device("meta" if way == "meta" else "cpu"):
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    sharding.shard(model, sharding.find_blocks(model), mesh=mesh, reshard_after_forward=True)
    if way == "meta":
        load_pretrained(model, folder)
        assert initialize(model) == []  # buffers that the checkpoint does not have
    return model


def measure(rank: int, world_size: int, port: int, way: str, folder: str) -> None:
    """One rank: prints the peak growth of its resident set."""
    import transformers  # noqa: F401  # before the measurement begins

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    restart_peak(CPU)
    before = memory_reader(CPU)()
    model = build(way, folder)
    grown = [torch.tensor([(peak(CPU) - before) / MIB]) for _ in range(world_size)]
    total = torch.stack([p.detach().full_tensor().double().sum() for p in model.parameters()]).sum()  # type: ignore[attr-defined]
    dist.all_gather(grown, grown[rank].clone())
    if rank == 0:
        size = sum(p.numel() for p in model.parameters()) * 4 / MIB
        peaks = ", ".join(f"{float(growth):.0f}" for growth in grown)
        print(f"| {WAYS[way]} | {peaks} | {size:.0f} / {size / world_size:.0f} | {float(total):.6f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Writes the checkpoint and measures each way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    print("| way | peak growth by rank, MiB | model / share, MiB | sum of weights |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder, max_shard_size="100MB")
        for way in WAYS:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(measure, (ranks, port, way, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
