"""The script for a GPU, at toy size on the CPU: its flow runs, its checks pass, and it can fail."""

from __future__ import annotations

import pytest
import torch

from examples import gpu_check


def test_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count("| ok |") == 9
    assert "FAILED" not in table
    assert "peak memory | needs a GPU" in table


def test_a_difference_fails() -> None:
    ones = [torch.ones(2)]
    assert gpu_check.compare("x", ones, ones, [torch.zeros(2)]).ok
    assert not gpu_check.compare("x", [torch.tensor([1.0, 1.1])], ones, [torch.zeros(2)]).ok
    assert not gpu_check.compare("x", ones, ones, ones).ok  # nothing was trained
    assert gpu_check.main(["--device", "cuda"]) == 2 or torch.cuda.is_available()
