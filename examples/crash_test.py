"""Kills a training run with SIGKILL at random moments and continues it from its newest checkpoint, again and again.

``python -m examples.crash_test`` does so 20 times on one device with checkpoint files, and 20 times on two FSDP2 ranks
with sharded folders; every second time while a checkpoint is being saved. After each kill the newest checkpoint must
load, and every step from there on must leave weights and optimizer state as the run does that nothing interrupts, to
the bit. It prints a table and writes all figures with ``--json``. The exit status is 1 when a state differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_bwdopt import FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy
from lightning_bwdopt.views import local_tensor

STEPS_OF_A_LIFE = 4  # a kill comes after at most so many
WAYS = {"file": 1, "folder": 2}  # what is saved, and by how many ranks
TIMEOUT = 120  # seconds without a word from any rank

Digests = dict[tuple[int, int], str]  # (rank, steps done) -> the state


class Net(LightningModule):
    """Blocks with dropout, trained by AdamW with warm-up; all that is random in a step follows from its number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Learns to halve noise; ``batch`` only counts."""
        torch.manual_seed(self.trainer.global_step)
        target = torch.randn(4, self.blocks[0][0].in_features)  # type: ignore[index]
        x = 2 * target
        for block in self.blocks:
            x = x + block(x) / 4
        return nn.functional.mse_loss(x, target)

    def configure_optimizers(self) -> Any:
        """AdamW in two groups; the rate rises at each step."""
        groups = [[p for p in self.parameters() if p.ndim > 1], [p for p in self.parameters() if p.ndim == 1]]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Reports(Callback):
    """Sends a digest of this rank's weights and optimizer state after loading and after each step."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._send("loaded", trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._send("stepped", trainer, pl_module)

    def _send(self, event: str, trainer: Trainer, module: LightningModule) -> None:
        digest = hashlib.sha256(repr([group["lr"] for group in trainer.optimizers[0].param_groups]).encode())
        for param in module.parameters():
            state = trainer.optimizers[0].state.get(param, {})
            for tensor in (param, *state.values()):
                digest.update(local_tensor(tensor).detach().numpy().data)
        self.pipe.send((event, trainer.global_step, digest.hexdigest()))


class SavesEachStep(ModelCheckpoint):
    """Keeps the two newest checkpoints and ``last.ckpt``, and tells when it begins and ends."""

    def __init__(self, pipe: Connection, folder: Path) -> None:
        newest: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2}
        super().__init__(folder, "{step}", save_last=True, every_n_train_steps=1, **newest)
        self.pipe = pipe

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.pipe.send(("saving", trainer.global_step, ""))
        super().on_train_batch_end(trainer, *args)
        self.pipe.send(("saved", trainer.global_step, ""))


def live(
    rank: int, way: str, port: int, pipe: Connection, folder: Path | None, ckpt_path: str | None, steps: int, width: int
) -> None:
    """One rank of a run, up to the end or until it is killed. ``folder``: where it saves, if it does."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stdout.fileno())
    os.dup2(quiet, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = WAYS[way]
    if ranks > 1:  # Lightning takes the processes for those of `torchrun`
        here: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "crash_test"}
        os.environ.update({key: str(value) for key, value in here.items()})
    try:
        torch.manual_seed(0)
        strategy = FSDPOptimInBwdStrategy(state_dict_type="sharded") if ranks > 1 else SingleDeviceOptimInBwdStrategy()
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=steps,
            callbacks=[Reports(pipe), *([SavesEachStep(pipe, folder)] if folder else [])],
            logger=False,
            enable_checkpointing=folder is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(width), DataLoader(TensorDataset(torch.zeros(2 * ranks))), ckpt_path=ckpt_path)
    except BaseException:
        pipe.send(("failed", -1, traceback.format_exc()))
        raise
    pipe.send(("ended", steps, ""))


class Run:
    """The processes of one life, and what they say."""

    def __init__(self, way: str, folder: Path | None, ckpt_path: str | None, steps: int, width: int) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(["lightning.pytorch", "torch.distributed.checkpoint"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.killed = False
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(WAYS[way]):
            mine, theirs = context.Pipe(duplex=False)
            args = (rank, way, port, theirs, folder, ckpt_path, steps, width)
            process = context.Process(target=live, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def events(self) -> Iterator[tuple[int, str, int, str]]:
        """``(rank, event, step, digest)`` as they come, until every rank has ended.

        Raises:
            RuntimeError: a rank failed by itself, or all are silent.
        """
        open_pipes = list(self.pipes)
        while open_pipes:
            ready = wait(open_pipes, TIMEOUT)
            if not ready:
                self.kill(0)
                raise RuntimeError(f"no rank has said anything for {TIMEOUT} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    event, step, text = pipe.recv()
                except (EOFError, OSError):
                    open_pipes.remove(pipe)
                    continue
                if event == "failed":
                    if self.killed:
                        continue  # this rank has seen another one die
                    self.kill(0)
                    raise RuntimeError(text)
                yield self.pipes.index(pipe), event, step, text

    def kill(self, first: int, between: float = 0.0) -> None:
        """SIGKILL for all ranks, one of them a moment before the others."""
        self.killed = True
        for rank in sorted(range(len(self.processes)), key=lambda rank: rank != first):
            self.processes[rank].kill()
            time.sleep(between)
        for process in self.processes:
            process.join()


class Life(NamedTuple):
    """What was seen of a run until it was killed or ended."""

    loaded_at: int  # steps
    steps: int
    saved_at: int  # the last save that was complete
    equal: int  # states, of all ranks
    different: int
    save_seconds: float | None


def newest(folder: Path) -> Path:
    """The newest checkpoint in a folder, by name and date: nothing is looked into."""
    return max(folder.glob("[!.]*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def unbroken(way: str, steps: int, width: int) -> tuple[Digests, float]:
    """The states of a run that is not interrupted and saves nothing, and the seconds of a step."""
    digests: Digests = {}
    started = 0.0
    for rank, event, step, digest in Run(way, None, None, steps, width).events():
        if event in ("loaded", "stepped"):
            digests[rank, step] = digest
            started = started or time.perf_counter()
    return digests, (time.perf_counter() - started) / steps


def watch(run: Run, expected: Digests, kill_at: tuple[str, int] | None, delay: float, first: int) -> Life:
    """Compares every state of a run, and kills it.

    Args:
        run: The run.
        expected: Its states, were it never interrupted.
        kill_at: Which event of rank 0 in which step after loading; ``None``: not at all.
        delay: How many seconds later.
        first: The rank that dies first.
    """
    loaded_at, steps, saved_at, equal, different = -1, 0, 0, 0, 0
    began, save_seconds = 0.0, None
    for rank, event, step, digest in run.events():
        if event in ("loaded", "stepped"):
            loaded_at = step if loaded_at < 0 else loaded_at
            steps = max(steps, step)
            same = digest == expected[rank, step]
            equal, different = equal + same, different + (not same)
        elif rank == 0 and event == "saving":
            began = time.perf_counter()
        elif rank == 0 and event == "saved":
            saved_at, save_seconds = step, time.perf_counter() - began
        if kill_at and (rank, event, step) == (0, kill_at[0], loaded_at + kill_at[1]):
            time.sleep(delay)
            run.kill(first, between=0.02)
            kill_at = None
    return Life(loaded_at, steps, saved_at, equal, different, save_seconds)


def crash(way: str, kills: int, width: int, seed: int) -> dict[str, Any]:
    """Kills a run so often, and lets it end at last.

    Returns:
        What became of each kill, by a name for each column, and what was written.
    """
    draw = random.Random(seed)
    steps = (kills + 1) * STEPS_OF_A_LIFE
    expected, step_seconds = unbroken(way, steps, width)
    save_seconds = step_seconds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ckpt_path: str | None = None
        for number in range(kills + 1):
            event, delay = ("saving", save_seconds) if number % 2 == 0 else ("saved", step_seconds)
            kill_at = (event, draw.randint(2, STEPS_OF_A_LIFE)) if number < kills else None
            run = Run(way, folder, ckpt_path, steps, width)
            life = watch(run, expected, kill_at, draw.uniform(0, delay), draw.randrange(WAYS[way]))
            save_seconds = life.save_seconds or save_seconds
            if rows:
                rows[-1] |= {"resumed at": life.loaded_at, "equal": life.equal, "different": life.different}
                rows[-1]["ok"] = life.loaded_at >= rows[-1]["saved"] and life.different == 0
            if number < kills:
                left_over = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
                ckpt_path = "last" if number % 4 > 1 else str(newest(folder))
                row = {"killed while": "saving" if event == "saving" else "training", "stepped": life.steps}
                rows.append({**row, "saved": life.saved_at, "left over": left_over, "from": Path(ckpt_path).name})
        last = folder / "last.ckpt"
        files = list(last.iterdir()) if last.is_dir() else [last]
        mib = sum(file.stat().st_size for file in files) / 2**20
    complete = life.steps == steps
    return {"way": way, "ranks": WAYS[way], "steps": steps, "complete": complete, "mib": round(mib, 1), "kills": rows}


def table(result: dict[str, Any]) -> str:
    """One line for each kill, in Markdown."""
    columns = list(result["kills"][0])
    lines = [columns, ["---"] * len(columns)]
    for row in result["kills"]:
        lines.append([", ".join(v) if isinstance(v, list) else str(v) for v in row.values()])
    title = f"{result['way']}, {result['ranks']} rank(s), checkpoints of {result['mib']} MiB"
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines), ""])


def main(arguments: list[str] | None = None) -> int:
    """Kills, compares and prints; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.crash_test", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="for each way")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--width", type=int, default=768, help="of the model; checkpoints have 48 x width^2 bytes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", help="a file for all the figures")
    options = parser.parse_args(arguments)
    results = []
    for way in options.ways:
        results.append(crash(way, options.kills, options.width, options.seed))
        print(table(results[-1]), flush=True)
    ok = all(result["complete"] and all(row["ok"] for row in result["kills"]) for result in results)
    print("every continued run equals the unbroken one" if ok else "A CONTINUED RUN DIFFERS")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
