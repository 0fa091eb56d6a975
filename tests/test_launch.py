"""Jobs started by `torchrun`: two agents as on two machines, a rank that dies, a restart from the newest checkpoint."""

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
TIMEOUT = 120


def agents(folder: Path, *job_arguments: str, nodes: int = 1, restarts: int = 0) -> list[tuple[int, str]]:
    """Runs one `torchrun` for each node, all on this machine; exit status and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "TORCHELASTIC"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    started = []
    for node in range(nodes):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node_rank={node}"]
        command += [f"--nproc_per_node={2 // nodes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command += [f"--max-restarts={restarts}", str(HERE / "launch_job.py"), str(folder), f"--nodes={nodes}"]
        output = (folder / f"node{node}.log").open("w+")
        process = subprocess.Popen([*command, *job_arguments], env=environment, stdout=output, stderr=output)
        started.append((process, output))
    ended = []
    deadline = time.monotonic() + TIMEOUT
    for process, output in started:
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # the agent ends its ranks
            status = process.wait()
        output.seek(0)
        ended.append((status, output.read()))
        output.close()
    return ended


def check_job(folder: Path) -> dict[str, object]:
    return job(folder, nodes=1, dies=None)


def test_two_agents_lose_a_rank_and_resume(tmp_path: Path) -> None:
    """As on two machines: rank 1 ends without a word, both agents start again from the newest checkpoint."""
    ordinary, restarted = tmp_path / "ordinary", tmp_path / "restarted"
    ordinary.mkdir()
    restarted.mkdir()
    expected = run_distributed(check_job, ordinary)
    for status, output in agents(restarted, "--dies=1", nodes=2, restarts=1):
        assert status == 0, output
    for rank in range(2):
        resumed = torch.load(restarted / f"rank{rank}.pt", weights_only=False)
        assert len(resumed["losses"]) == 2  # from step 4, the newest checkpoint, to 6
        for key in ("weights", "state", "groups", "global_step"):
            assert_equal(resumed[key], expected[rank][key], key)
        assert_equal(resumed["losses"], expected[rank]["losses"][4:])


def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    ((status, output),) = agents(tmp_path, "--dies=1")
    assert status != 0, output
    assert "launch_job.py FAILED" in output
    assert "exitcode  : 3" in output
    assert not list(tmp_path.glob("rank*.pt"))
