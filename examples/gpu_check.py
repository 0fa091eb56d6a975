"""Everything about the optimizer in backward that only a GPU can show, in one table and under five minutes.

Run on one GPU: ``python -m examples.gpu_check``. ``--device cpu`` runs the same flow at toy size, to test the script.
It starts a process group of one rank (nccl, or gloo on the CPU), so that FSDP2's streams and hooks are the real ones.
The exit status is 1 when a check fails.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.utils.data import DataLoader

from lightning_bwdopt import FSDPOptimInBwdStrategy, OptimizerInBackward, sharding
from lightning_bwdopt.memory import MIB
from lightning_bwdopt.process_memory import peak, restart_peak
from lightning_bwdopt.units import units_of

SLEEP_CYCLES = 20_000_000  # about 10 ms on a GPU


class Size(NamedTuple):
    """The model of the checks; parameters are 8 x width^2 a block."""

    width: int
    depth: int
    batch: int
    steps: int


SIZES = {
    "toy": Size(width=16, depth=3, batch=4, steps=4),
    "equality": Size(width=512, depth=8, batch=64, steps=12),
    "memory": Size(width=4096, depth=12, batch=256, steps=6),  # 1.6 B parameters
}


class Row(NamedTuple):
    """One line of the table; ``ok`` is ``None`` for a figure without a verdict."""

    check: str
    result: str
    ok: bool | None = None


class Block(nn.Module):
    """A residual block of matrix products, whose kernels give the same bits each time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: float tensor of shape ``(batch, width)``, and so is the result."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Net(LightningModule):
    """The blocks; as a LightningModule it trains them with AdamW."""

    def __init__(self, size: Size, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.fused = fused or None

    def forward(self, x: Tensor) -> Tensor:
        """``x``: float tensor of shape ``(batch, width)``, and so is the result."""
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean of squares, so that every parameter has a gradient."""
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with a rate at which weights move visibly."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)


class Setting(NamedTuple):
    """How a run is set up."""

    name: str
    fused: bool = True
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    offload: CPUOffloadPolicy | None = None
    clip: tuple[str, float] | None = None


class Run:
    """One model under FSDP2 in a plain loop, ordinary or with the optimizer in backward."""

    def __init__(self, device: torch.device, size: Size, setting: Setting, in_backward: bool) -> None:
        net = Net(size, setting.fused).to(setting.dtype)
        if setting.offload is None:
            net.to(device)
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setting.mixed else MixedPrecisionPolicy()
        sharding.shard(
            net,
            sharding.find_blocks(net),
            mesh=init_device_mesh(device.type, (1,)),
            reshard_after_forward=True,
            mp_policy=low,
            offload_policy=setting.offload or OffloadPolicy(),
        )
        noise = torch.Generator().manual_seed(1)
        self.batch = torch.randn(size.batch, size.width, generator=noise).to(device, setting.dtype)
        self.net, self.clip = net, setting.clip
        self.optimizer = net.configure_optimizers()
        self.core = None
        if in_backward:
            self.core = OptimizerInBackward(self.optimizer, units_of(net), clip=setting.clip)
            self.core.attach()

    def backward(self) -> None:
        """Forward and backward; in backward mode the step too."""
        loss = self.net(self.batch).float().square().mean()
        if self.core is not None:
            self.core.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        """One whole training step."""
        self.backward()
        if self.core is None and self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip[1])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self, steps: int) -> list[Tensor]:
        """The parameters after some steps, on the host."""
        for _ in range(steps):
            self.step()
        # FSDP2 keeps the root gathered after a forward pass; of one rank a shard is the whole.
        return [p.to_local().detach().cpu().clone() for p in self.net.parameters()]  # type: ignore[attr-defined]


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference between two lists of tensors."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(actual, expected, strict=True))


def compare(check: str, actual: list[Tensor], expected: list[Tensor], start: list[Tensor], limit: float = 0) -> Row:
    """A row that passes when the runs agree and have trained."""
    worst, moved = difference(actual, expected), difference(expected, start)
    return Row(check, f"largest difference {worst:.1e} (weights moved by {moved:.1e})", worst <= limit and moved > 1e-4)


def check_equality(device: torch.device, size: Size) -> list[Row]:
    """The core against the ordinary optimizer in each setting, pinned host offload among them."""
    settings = [
        Setting("fp32, for-loop AdamW", fused=False),
        Setting("fp32, fused AdamW"),
        Setting("bf16-true, fused AdamW", dtype=torch.bfloat16),
        Setting("bf16-mixed, fused AdamW", mixed=True),
        Setting("exact clipping by norm", clip=("norm", 0.01)),
        Setting("host offload, pageable", offload=CPUOffloadPolicy(pin_memory=False)),
    ]
    if device.type != "cpu":  # pinning needs an accelerator
        settings.append(Setting("host offload, pinned (race, pytorch#180666)", offload=CPUOffloadPolicy()))
    rows = []
    for setting in settings:
        start = [p.detach().clone() for p in Net(size).to(setting.dtype).parameters()]
        ordinary = Run(device, size, setting, in_backward=False).weights(size.steps)
        in_backward = Run(device, size, setting, in_backward=True).weights(size.steps)
        limit = 1e-6 if setting.clip else 0
        rows.append(compare(f"equal: {setting.name}", in_backward, ordinary, start, limit))
    return rows


def check_lightning(device: torch.device, size: Size) -> list[Row]:
    """The strategy in Lightning's Trainer against the same with the mode off."""
    weights = []
    for enabled in (False, True):
        net = Net(size, fused=True)
        noise = torch.Generator().manual_seed(1)
        data: Any = list(torch.randn(size.batch * size.steps, size.width, generator=noise))
        trainer = Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1,
            strategy=FSDPOptimInBwdStrategy(enabled=enabled),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(net, DataLoader(data, batch_size=size.batch))
        weights.append([p.to_local().detach().cpu().clone() for p in net.parameters()])  # type: ignore[attr-defined]
    start = [p.detach().clone() for p in Net(size).parameters()]
    return [compare("equal: Trainer with `fsdp_optim_in_bwd`", weights[1], weights[0], start)]


def check_streams(device: torch.device, size: Size) -> list[Row]:
    """Delays the hooks' stream, then the main one: unordered work would read or write at the wrong time."""
    setting = Setting("fp32, fused AdamW")
    start = [p.detach().clone() for p in Net(size).parameters()]
    ordinary = Run(device, size, setting, in_backward=False).weights(size.steps)
    rows = []
    for where in ("before each step, in the hooks", "in each block's backward"):
        run = Run(device, size, setting, in_backward=True)
        streams: set[Any] = set()

        def slow(_: Any, seen: set[Any] = streams) -> None:
            if device.type == "cuda":
                seen.add(torch.cuda.current_stream())
                torch.cuda._sleep(SLEEP_CYCLES)

        def slow_backward(_: nn.Module, args: Any, output: Tensor, hook: Callable[[Any], None] = slow) -> None:
            output.register_hook(hook)

        if "hooks" in where:
            assert run.core is not None
            run.core.remove()  # hooks run in the order of their registration
            for param in run.net.parameters():
                param.register_post_accumulate_grad_hook(slow)
            run.core.attach()
        else:
            for block in run.net.blocks:
                block.register_forward_hook(slow_backward)
        row = compare(f"streams: delay {where}", run.weights(size.steps), ordinary, start)
        own = sum(stream != torch.cuda.default_stream() for stream in streams)
        told = f"{own} of {len(streams)} streams are not the default one" if streams else "a delay needs a GPU"
        rows.append(row._replace(result=f"{row.result}; {told}"))
    return rows


def check_memory_and_time(device: torch.device, size: Size) -> list[Row]:
    """Peak memory of a step, and how much of the optimizer's time is hidden under backward."""
    torch.use_deterministic_algorithms(False)  # it fills fresh memory, which takes time
    setting = Setting("bf16-true, fused AdamW", dtype=torch.bfloat16)
    peaks: dict[bool, float] = {}
    seconds: dict[bool, float] = {}
    for in_backward in (False, True):
        run = Run(device, size, setting, in_backward)
        for _ in range(3):
            run.step()
        if device.type == "cuda":
            restart_peak(device)
        seconds[in_backward] = median_time(run.step, device, size.steps)
        if device.type == "cuda":
            peaks[in_backward] = peak(device) / MIB
        if not in_backward:
            run.backward()
            optimizer = median_time(run.optimizer.step, device, size.steps)  # the gradients stay
        params = sum(p.numel() for p in run.net.parameters())
        del run
        if device.type == "cuda":
            torch.cuda.empty_cache()
    hidden = (seconds[False] - seconds[True]) / optimizer
    told = f", of which {hidden:.0%} hide under backward" if peaks else "; hiding it needs a GPU"
    rows = [
        Row("model", f"{params / 1e6:.1f} M parameters, {setting.name}"),
        Row("step time", f"{seconds[False] * 1e3:.2f} ms ordinary, {seconds[True] * 1e3:.2f} ms in backward"),
        Row("optimizer", f"{optimizer * 1e3:.2f} ms{told}"),
    ]
    if not peaks:
        return [*rows, Row("peak memory", "needs a GPU")]
    saved, gradients = peaks[False] - peaks[True], 2 * params / MIB
    told = f"{peaks[False]:.0f} MiB ordinary, {peaks[True]:.0f} MiB in backward; all gradients are {gradients:.0f} MiB"
    return [*rows, Row("peak memory (max_memory_allocated)", told, saved > 0)]


def median_time(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of one call, the median of some."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def print_table(rows: list[Row]) -> None:
    """The rows as a Markdown table, to paste into docs/results.md."""
    print("| check | result | |\n|---|---|---|")
    for row in rows:
        print(f"| {row.check} | {row.result} | {'' if row.ok is None else 'ok' if row.ok else 'FAILED'} |")


def main(arguments: list[str] | None = None) -> int:
    """Runs all checks; 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU that torch can use here. `--device cpu` runs the same flow at toy size.")
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    toy = device.type == "cpu"
    equality, memory = (SIZES["toy"], SIZES["toy"]) if toy else (SIZES["equality"], SIZES["memory"])
    where = (
        "toy size on the CPU: shows that the script runs, and no figure of use" if toy else torch.cuda.get_device_name()
    )
    begun = time.perf_counter()
    rows = [Row("torch", f"{torch.__version__}, {backend}, {where}")]
    for check, size in (
        (check_equality, equality),
        (check_lightning, equality),
        (check_streams, equality),
        (check_memory_and_time, memory),
    ):
        rows += check(device, size)
    rows.append(Row("all checks", f"{time.perf_counter() - begun:.0f} s"))
    dist.destroy_process_group()
    print_table(rows)
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
