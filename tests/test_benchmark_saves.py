"""The timing of saves at toy size: each way saves, and its figures are there."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from examples import benchmark_saves
from helpers import run_distributed


def check(tmp: str) -> None:
    for kind in benchmark_saves.KINDS:
        result = benchmark_saves.measure(kind, 1, True, tmp, torch.device("cpu"))
        assert list(result["seconds"]) == list(benchmark_saves.WAYS)
        assert all(len(times) == 1 and min(times) > 0 for times in result["seconds"].values())
        assert result["mib"] == 0  # 16 KiB and the file's own
    torch.distributed.barrier()
    assert os.listdir(tmp) == []


def test_measures_each_way(tmp_path: Path) -> None:
    run_distributed(check, str(tmp_path))
