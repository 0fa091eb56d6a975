"""Measures the ways to step AdamW, side by side: time of a step, of the optimizer in it, of a save, and peak memory.

    python -m examples.benchmark                                   # every scenario, one process and two gloo ranks
    python -m examples.benchmark --scenarios many-small --ranks 2 --json out.json
    python -m examples.benchmark --device cuda --ranks 1

Every way trains its own copy of the model in the same processes. A round runs all of them, in an order that rotates;
ratios are to the ordinary fused optimizer of the same round; a figure is a median, with its quartiles. The ordinary
way runs twice: the spread of the second against the first is the noise below which a ratio says nothing. Times are
rank 0's, with one thread a rank: of a step on the wall and as CPU time, which other work on the machine disturbs less;
of the optimizer in hooks and in what the loop calls after backward; and of its step alone, of gradients that are there.

Other systems are measured where they import (``pip install -e .[benchmark]``), and named when they do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from examples.benchmark_models import SCENARIOS, Scenario
from examples.benchmark_tables import growth, pairs, summarize, summary, table
from examples.benchmark_ways import ORDINARY, WAYS, Unavailable
from lightning_bwdopt.process_memory import PROMPT_ALLOCATOR, memory_reader, peak, restart_peak
from lightning_bwdopt.sharding import find_blocks, shard
from lightning_bwdopt.views import local_tensor

MIB = 2**20


class Run:
    """A model that one way trains."""

    def __init__(self, way: str, scenario: Scenario, device: torch.device) -> None:
        torch.manual_seed(0)
        self.scenario = scenario
        self.device = device
        self.model = scenario.build().to(device)
        blocks = find_blocks(self.model)
        if dist.is_initialized():
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            shard(self.model, blocks, mesh=mesh, reshard_after_forward=True)
        self.way = WAYS[way](self.model, blocks)
        self.batch = scenario.batch(device)

    def step(self) -> None:
        self.way.backward(self.scenario.loss(self.model, self.batch))
        self.way.finish()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, call: Callable[[], Any], repeats: int = 1) -> tuple[float, float]:
        """Milliseconds per call: on the wall, and of this process's CPU time (all its threads)."""
        if dist.is_initialized():
            dist.barrier()
        start, start_cpu = self.now(), time.process_time()
        for _ in range(repeats):
            call()
        wall, cpu = self.now() - start, time.process_time() - start_cpu
        return wall * 1e3 / repeats, cpu * 1e3 / repeats

    def time_optimizer(self) -> float:
        """Milliseconds of one step that pass in hooks on parameters and in `finish`."""
        spent = 0.0
        started = 0.0

        def start(_: Tensor) -> None:
            nonlocal started
            started = self.now()

        def stop(_: Tensor) -> None:
            nonlocal spent
            spent += self.now() - started

        with self._around_hooks(start, stop):
            self.way.backward(self.scenario.loss(self.model, self.batch))
        return spent * 1e3 + self.time(self.way.finish)[0]

    def time_alone(self) -> float:
        """Milliseconds in which gradients that are all there are stepped and dropped."""
        for param in self.model.parameters():
            local = torch.zeros_like(local_tensor(param))
            # As FSDP2 makes it: it shares the parameter's layout.
            param.grad = DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local
        return self.time(self.way.step)[0]

    def live_gradients(self) -> float:
        """The most MiB of gradient storage that this rank holds at once in a step."""
        most = 0
        params = list(self.model.parameters())

        def look(_: Tensor) -> None:
            nonlocal most
            locals_ = [getattr(p.grad, "_local_tensor", p.grad) for p in params if p.grad is not None]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}
            most = max(most, sum(storages.values()))

        with self._around_hooks(look, lambda _: None):
            self.step()
        return most / MIB

    @contextmanager
    def _around_hooks(self, before: Callable[[Tensor], None], after: Callable[[Tensor], None]) -> Iterator[None]:
        """Calls `before` ahead of the hooks that each parameter has, and `after` behind them."""
        handles = []
        for param in self.model.parameters():
            others = dict(param._post_accumulate_grad_hooks or {})
            handles.append(param.register_post_accumulate_grad_hook(before))
            hooks = param._post_accumulate_grad_hooks
            for key, hook in others.items():
                del hooks[key]
                hooks[key] = hook
            handles.append(param.register_post_accumulate_grad_hook(after))
        yield
        for handle in handles:
            handle.remove()


def measure_times(scenario: Scenario, ways: list[str], rounds: int, device: torch.device) -> dict[str, Any]:
    """Each way's times per round, or why it did not run."""
    runs: dict[str, Run] = {}
    results: dict[str, Any] = {}
    for way in ways:
        try:
            run = Run(way, scenario, device)
            run.step()
            run.step()
        except Exception as error:
            results[way] = {"skipped": str(error).splitlines()[0] if str(error) else type(error).__name__}
        else:
            runs[way] = run
            results[way] = {"step": [], "cpu": [], "optimizer": []}
    gc.collect()
    gc.freeze()
    for way in _in_turn(list(runs), rounds):
        wall, cpu = runs[way].time(runs[way].step, scenario.repeats)
        results[way]["step"].append(wall)
        results[way]["cpu"].append(cpu)
    for way in _in_turn(list(runs), rounds):
        times = [runs[way].time_optimizer() for _ in range(scenario.repeats)]
        results[way]["optimizer"].append(statistics.median(times))
    for way in _in_turn(list(runs), rounds):
        with suppress(Unavailable):
            times = [runs[way].time_alone() for _ in range(scenario.repeats)]
            results[way].setdefault("alone", []).append(statistics.median(times))
    for way, run in runs.items():
        if scenario.counts_gradients:
            results[way]["gradient_mib"] = run.live_gradients()
        with suppress(Unavailable):
            results[way]["save"] = [run.time(run.way.save)[0] for _ in range(min(rounds, 5))]
    gc.unfreeze()
    return results


def _in_turn(ways: list[str], rounds: int) -> Iterator[str]:
    """Every way once a round; another one is the first in each."""
    for number in range(rounds):
        shift = number % len(ways)
        yield from ways[shift:] + ways[:shift]


def measure_memory(scenario: Scenario, way: str, device: torch.device) -> float:
    """MiB by which memory rises in a step above parameters and optimizer state, in a process of its own."""
    run = Run(way, scenario, device)
    for _ in range(3):
        run.step()
    gc.collect()
    restart_peak(device)
    before = memory_reader(device)()
    run.step()
    return (peak(device) - before) / MIB


# Processes ----------------------------------------------------------------------------------------------------------


def launch(ranks: int, device: str, call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in `ranks` fresh processes, with the device as its last argument; what rank 0 returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_rank, (ranks, port, device, results, call, args), nprocs=ranks)
    return results.get()


def _rank(rank: int, ranks: int, port: int, kind: str, results: Any, call: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    result = call(*args, device)
    if rank == 0:
        results.put(result)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def _returning_memory() -> Iterator[None]:
    """Has the C library give freed memory back at once, or the resident set would not show what is live."""
    before = dict(os.environ)
    os.environ.update(PROMPT_ALLOCATOR)
    try:
        yield
    finally:
        for key in PROMPT_ALLOCATOR:
            os.environ.pop(key)
            if key in before:
                os.environ[key] = before[key]


def import_seconds(rounds: int = 5) -> dict[str, float]:
    """What `import lightning_bwdopt` adds to `import lightning`: median over fresh processes."""
    code = "import time, lightning; t = time.perf_counter(); import lightning_bwdopt; print(time.perf_counter() - t)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds)]
    return summary([float(run.stdout) for run in runs])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m examples.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", default=["many-small", "one-large", "recipe"], choices=SCENARIOS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory", action="store_true", help="measure each way's memory in processes of its own")
    parser.add_argument("--import-time", action="store_true", help="measure what importing the package adds")
    parser.add_argument("--json", help="a file for all the figures")
    options = parser.parse_args(arguments)
    ways = list(dict.fromkeys([ORDINARY, *options.ways]))
    report: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "results": []}
    for name in options.scenarios:
        for ranks in options.ranks:
            scenario = SCENARIOS[name]
            rounds = options.rounds if not scenario.slow else max(3, options.rounds // 3)
            times = launch(ranks, options.device, measure_times, scenario, ways, rounds)
            results, paired = summarize(times), pairs(times)
            if options.memory:
                with _returning_memory():
                    for way, row in results.items():
                        if "skipped" not in row:
                            row["memory_mib"] = launch(ranks, options.device, measure_memory, scenario, way)
            report["results"].append(
                {"scenario": name, "ranks": ranks, "rounds": rounds, "ways": results, "pairs": paired}
            )
            print(table(name, ranks, results, paired), flush=True)
    if scaling := growth(report["results"]):
        report["growth"] = scaling
        print(f"10 x the parameters take, times as long: {scaling}")
    if options.import_time:
        report["import_s"] = import_seconds()
        print(f"import lightning_bwdopt adds {report['import_s']['median']:.3f} s to import lightning")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)
    return report


if __name__ == "__main__":
    main()
