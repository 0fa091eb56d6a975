"""``lightning-bwdopt compare``: the same run ordinarily and in backward, and whether anything but memory differs."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_bwdopt import plots
from lightning_bwdopt.callbacks import MODES
from lightning_bwdopt.comparison import Comparison, Run
from lightning_bwdopt.differences import Difference
from lightning_bwdopt.process_memory import PROMPT_ALLOCATOR

_OUTPUTS = {"report.html", "report.json", "ordinary.log", "in_backward.log"}
_WORK = ".runs-"  # what a folder of the runs' own figures begins with; one is left by a process that is killed


def _differences(runs: Sequence[Run], folders: Sequence[Path]) -> dict[str, Difference]:
    found = {part: Difference() for part in ("losses", "parameters", "optimizer_state")}
    if [len(rank) for rank in runs[0].steps] != [len(rank) for rank in runs[1].steps]:
        found["losses"].see(math.inf, "the number of steps")
    for rank in range(runs[0].facts["world_size"]):
        for number, (mine, other) in enumerate(zip(runs[0].steps[rank], runs[1].steps[rank])):
            found["losses"].see_each(_of_step(mine), _of_step(other), f"step {number + 1}, rank {rank}")
        # Mapped files: only what is compared at a time is read.
        files = [torch.load(folder / f"rank{rank}.pt", mmap=True, map_location="cpu") for folder in folders]
        for part in ("parameters", "optimizer_state"):
            found[part].see_each(files[0][part], files[1][part], f"rank {rank}")
    return found


def _of_step(step: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in step["losses"].items()}


# The runs -------------------------------------------------------------------------------------------------------------


class RunFailedError(RuntimeError):
    """A run ended with an error of its own."""


def run(mode: str, steps: int, args: Sequence[str], folder: Path, log: Path, bar: Any) -> Run:
    """Trains in one of the modes, in processes of its own, which start with no memory in use.

    Args:
        mode: One of ``MODES``.
        steps: How many.
        args: Arguments of ``fit``.
        folder: An empty one, for the run's figures.
        log: Where the output of the processes goes.
        bar: A progress bar that counts steps.

    Raises:
        RunFailedError: the training failed, or made no step.
    """
    command = [sys.executable, "-m", "lightning_bwdopt.compared_run", mode, str(steps), str(folder), *args]
    environment = {**PROMPT_ALLOCATOR, **os.environ}
    progress, seen = folder / "rank0.jsonl", 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                done = progress.read_bytes().count(b"\n") if progress.exists() else 0
                bar.update(done - seen)
                seen = done
        finally:
            if process.returncode != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # all its ranks; one may wait for another
                process.wait()
    if process.returncode != 0:
        end = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-25:])
        raise RunFailedError(f"the {mode} run ended with status {process.returncode}:\n{end}\nAll it said is in {log}")
    if not progress.exists():
        raise RunFailedError(f"the {mode} run made no step: the config gives it no batches. What it said is in {log}")
    bar.update(progress.read_bytes().count(b"\n") - seen)
    return Run.read(folder)


def compare(args: Sequence[str], steps: int, out: Path, tolerance: float = 0.0) -> Comparison:
    """Runs a config in both modes and compares the results.

    Args:
        args: Command-line arguments of ``fit``, such as ``["--config", "train.yaml"]``.
        steps: How many optimizer steps to make.
        out: An existing folder: the logs go there, and for the time being the final weights and states.
        tolerance: The largest difference that is no breach of parity.

    Raises:
        RunFailedError: one of the trainings failed.
    """
    # Beside the report, where the user expects data to go, since the weights may not fit into `/tmp`.
    with tempfile.TemporaryDirectory(dir=out, prefix=_WORK) as work, _bar(2 * steps) as bar:
        folders, runs = [Path(work) / mode.replace(" ", "_") for mode in MODES], []
        for mode, folder in zip(MODES, folders, strict=True):
            bar.set_description(mode)
            folder.mkdir()
            runs.append(run(mode, steps, args, folder.absolute(), out / f"{folder.name}.log", bar))
        bar.set_description("comparing")
        return Comparison(runs[0], runs[1], _differences(runs, folders), tolerance, steps)


def prepare(out: Path) -> None:
    """Makes the folder of the report; an earlier report there is removed, and what a killed run has left.

    Raises:
        ValueError: it holds something else.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out {out}` is a file. Pass a folder, which is made if need be.")
    out.mkdir(parents=True, exist_ok=True)
    left = list(out.glob(f"{_WORK}*"))
    others = sorted({path.name for path in out.iterdir()} - _OUTPUTS - {path.name for path in left})
    if others:
        raise ValueError(f"`--out {out}` holds `{others[0]}`, which is no report of this command. Pass another folder.")
    for folder in left:
        shutil.rmtree(folder)
    for name in _OUTPUTS:
        (out / name).unlink(missing_ok=True)


def _bar(steps: int) -> tqdm:
    # In a log file each state of the bar is a line: one in ten seconds is enough.
    return tqdm(total=steps, unit="step", mininterval=0.1 if sys.stderr.isatty() else 10)


@contextlib.contextmanager
def _exiting_on_termination() -> Iterator[None]:
    """Has the runs ended, and their files removed, also when a scheduler ends this process."""
    ends = (signal.SIGTERM, signal.SIGHUP)  # the runs have a session of their own, which a hang-up does not reach
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ends]
    try:
        yield
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def main(args: list[str]) -> int:
    """Runs ``lightning-bwdopt compare``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-bwdopt compare",
        description="Trains a config for some steps, ordinarily and with the optimizer in backward, from the same seed,"
        " and writes a page that shows both: losses, step times, memory, and whether anything differs.",
        epilog="Every other argument is one of `lightning-bwdopt fit`: --config FILE, --data.batch_size=4, … Loggers,"
        " checkpoints, profiler and progress bars are left out; other callbacks run. Exit status: 0 when the runs are"
        " equal, 1 when they are not, 2 when one of them failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: 20)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for report.html and report.json")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest difference that counts as equal (default: 0; some GPU kernels differ from run to run)",
    )
    options, rest = parser.parse_known_args(args)
    if options.steps < 1:
        parser.error(f"`--steps={options.steps}` is no number of steps. Pass 1 or more.")
    try:
        plots.need_matplotlib(parser.prog)
        prepare(options.out)
        with _exiting_on_termination():
            result = compare(rest, options.steps, options.out, options.tolerance)
    except (ModuleNotFoundError, ValueError, OSError, RunFailedError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    from lightning_bwdopt import report

    (options.out / "report.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    (options.out / "report.html").write_text(report.page(result, rest))
    print(result.verdict())
    print(f"Peak memory: {report.memory_in_words(result)}. {report.time_in_words(result)}")
    print(f"Report: {options.out / 'report.html'}")
    return int(not result.parity)
