"""Jobs on several machines, all of them this one: `torchrun` agents, SLURM's variables, ranks that die or hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from helpers import assert_equal, run_distributed
from launch_job import job

HERE = Path(__file__).parent
TIMEOUT = 200
SECONDS_TO_WAIT = 8  # for a rank that hangs


def launch(commands: list[list[str]], folder: Path, variables: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """Starts processes in an environment that knows of no job but that of its variables; they write to log files."""
    foreign = ("MASTER_", "TORCHELASTIC", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    started = []
    for number, (command, own) in enumerate(zip(commands, variables, strict=True)):
        with (folder / f"{number}.log").open("w") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command], env=environment | own, stdout=output, stderr=output, text=True
                )
            )
    return started


def ended(processes: list[subprocess.Popen[str]], folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of each process, terminated where it takes too long."""
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # an agent ends its ranks
            process.wait()
    return [(process.returncode, (folder / f"{number}.log").read_text()) for number, process in enumerate(processes)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def agents(folder: Path, *job_arguments: str) -> list[tuple[int, str]]:
    """Runs two `torchrun` with one rank each, as on two nodes; exit status and output of each."""
    address = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    job_of_two = [str(HERE / "launch_job.py"), str(folder), "--nodes=2", *job_arguments]
    commands = [
        ["-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1", "--max-restarts=1"]
        + [*address, *job_of_two]
        for node in range(2)
    ]
    return ended(launch(commands, folder, [{}, {}]), folder)


def check_job(folder: Path) -> dict[str, object]:
    return job(folder)


def test_two_agents_lose_a_rank_and_resume(tmp_path: Path) -> None:
    """As on two machines: rank 1 dies, both agents start again from the newest checkpoint; it dies again: the end."""
    ordinary, restarted = tmp_path / "ordinary", tmp_path / "restarted"
    ordinary.mkdir()
    restarted.mkdir()
    expected = run_distributed(check_job, ordinary)
    ended_agents = agents(restarted, "--at-first=dies", "--in-the-end=dies")
    for rank, (status, output) in enumerate(ended_agents):
        resumed = torch.load(restarted / f"rank{rank}.pt", weights_only=False)
        assert len(resumed["losses"]) == 2, output  # from step 4, the newest checkpoint, to 6
        for key in ("weights", "state", "groups", "global_step"):
            assert_equal(resumed[key], expected[rank][key], key)
        assert_equal(resumed["losses"], expected[rank]["losses"][4:])
        assert status != 0, output
        assert "launch_job.py FAILED" in output
    assert "exitcode  : 3" in ended_agents[1][1]


def test_slurm_and_a_rank_that_hangs(tmp_path: Path) -> None:
    """What `srun` starts on two nodes with one task each, as far as the variables go; then rank 1 hangs."""
    expected = run_distributed(check_job, tmp_path / "ordinary")
    common = {
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "1234",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost,elsewhere",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "MASTER_PORT": free_port(),  # by default it is made of the job's number, and may be taken here
    }
    own = [{**common, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r), "SLURM_LOCALID": "0"} for r in range(2)]
    command = [str(HERE / "launch_job.py"), str(tmp_path), "--nodes=2", "--together=2", "--in-the-end=hangs"]
    processes = launch([[*command, f"--timeout={SECONDS_TO_WAIT}"]] * 2, tmp_path, own)
    ended(processes[:1], tmp_path)
    processes[1].kill()  # as `srun --kill-on-bad-exit` does
    (status, output), _ = ended(processes, tmp_path)
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"rank{rank}.pt", weights_only=False), expected[rank])
    assert status == 1, output
    assert f"Timed out waiting {SECONDS_TO_WAIT}000ms" in output
