"""The comparison of two runs: equal ones, one that is broken on purpose, one that fails, and the page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from helpers import Lit, loader
from lightning_bwdopt import compare, plots
from lightning_bwdopt.compared_run import ComparedCLI, _plain
from lightning_bwdopt.differences import Difference, difference_of

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium")


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader(4, ranks=2)

    def val_dataloader(self) -> DataLoader:
        return loader(2, ranks=2)


class Cheats(Lit):
    """Trains otherwise when the mode is on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.trainer.strategy.enabled and self.trainer.global_step == 2 else loss


def test_an_entry_that_is_no_tensor_is_compared_in_full() -> None:
    big = torch.arange(2000.0)
    other = big.clone()
    other[1000] += 1
    entries = [_plain("x", [np.float64(0.5), {"a": 1}, part]) for part in (big, other)]
    assert [type(value) for value in entries[0].values()] == [float, str, Tensor]
    assert not torch.equal(entries[0]["x[2]"], entries[1]["x[2]"])


class Breaks(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("no third batch")
        return super().training_step(batch, batch_idx)


def config(folder: Path, model: str, **trainer_options: Any) -> list[str]:
    """Writes a config whose run would leave files in the folder ``theirs``; the arguments that name it."""
    theirs = folder / "theirs"
    content = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "default_root_dir": str(theirs),
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(theirs)}},
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"},
                {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(theirs), "every_n_train_steps": 1},
                },
            ],
            **trainer_options,
        },
        "model": {"class_path": model},
        "data": {"class_path": "test_compare.Data"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "config.yaml")]


@pytest.fixture(autouse=True)
def _as_from_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")  # for the processes of the runs
    monkeypatch.setattr(sys, "argv", ["program"])


def test_equal_runs_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    args = config(tmp_path, "helpers.Lit", devices=2, accumulate_grad_batches=2)
    assert compare.main([*args, "--steps=6", f"--out={out}"]) == 0
    printed = capfd.readouterr()
    assert "Equal to the bit: losses, parameters and optimizer state of 6 steps on 2 ranks." in printed.out
    assert re.search(r"in backward.*\d+/12 ", printed.err)  # the bar
    assert not (tmp_path / "theirs").exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "in_backward.log",
        "ordinary.log",
        "report.html",
        "report.json",
    ]
    figures = json.loads((out / "report.json").read_text())
    assert figures["parity"] is True
    assert figures["largest_difference"] == {"losses": 0, "parameters": 0, "optimizer_state": 0}
    assert figures["steps"] == 6
    assert figures["world_size"] == 2
    assert figures["strategy"] == "FSDPOptimInBwdStrategy"
    for mode in ("ordinary", "in_backward"):
        assert len(figures["losses"][mode]["loss"]) == len(figures["seconds"][mode]) == 6
        assert len(figures["peak_mib"][mode]) == 2
        assert all(100 < peak < 10_000 for peak in figures["peak_mib"][mode])
    assert len(set(figures["losses"]["ordinary"]["loss"])) == 6  # it trains
    assert figures["time_ratio"] == pytest.approx(
        figures["step_seconds"]["in_backward"] / figures["step_seconds"]["ordinary"]
    )
    page = (out / "report.html").read_text()
    assert page.count("<img ") == 4  # loss, time, and the memory of each run
    assert "://" not in page  # no outside address
    if CHROMIUM is not None:
        _check_in_a_browser(out / "report.html", "Equal to the bit")


def _check_in_a_browser(page: Path, verdict: str) -> None:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1600"]
    picture = page.with_suffix(".png")
    done = subprocess.run(
        [*command, "--dump-dom", f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=60
    )
    assert verdict in done.stdout, done.stderr
    assert done.stdout.count("<img ") == 4


def in_this_process(mode: str, steps: int, args: Any, folder: Path, log: Path, bar: Any) -> compare.Run:
    ComparedCLI(mode, steps, folder, list(args))
    return compare.Run.read(folder)


@pytest.mark.filterwarnings("ignore:Gradient clipping .* is disabled")
def test_broken_parity_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two processes that import torch take 10 s; that they are started is seen in the test of equal runs.
    monkeypatch.setattr(compare, "run", in_this_process)
    out = tmp_path / "report"
    (out / ".runs-killed" / "ordinary").mkdir(parents=True)
    (out / "report.html").write_text("an earlier one")
    args = config(tmp_path, "test_compare.Cheats", gradient_clip_val=100.0)
    assert compare.main([*args, "--steps=4", f"--out={out}"]) == 1
    assert "Parity is broken: after 4 steps on 1 rank the " in capfd.readouterr().out
    figures = json.loads((out / "report.json").read_text())
    assert figures["parity"] is False
    assert figures["strategy"] == "SingleDeviceOptimInBwdStrategy"
    assert all(difference > 0 for difference in figures["largest_difference"].values())
    losses = figures["losses"]
    assert losses["ordinary"]["loss"][:2] == losses["in_backward"]["loss"][:2]
    assert losses["in_backward"]["loss"][2] == 2 * losses["ordinary"]["loss"][2]
    page = (out / "report.html").read_text()
    assert "Parity is broken" in page
    assert "Likely cause: <code>gradient_clip_val=100.0</code> is disabled in backward." in page
    assert len(figures["likely_causes"]) == 1  # the first losses are equal
    assert figures["largest_difference_at"]["losses"] == "loss, step 3, rank 0"
    assert "`" not in page
    assert "0.0 M parameters" not in page
    assert "x the time" in page
    assert "step 3, rank 0" in page  # that of the memory
    assert not list(out.glob(".runs-*"))


FAMILY = """
import os, time
from lightning_bwdopt.compared_run import end_with_parent
if os.fork() == 0:
    end_with_parent()
    print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a child of its parent's death")
def test_a_run_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.communicate(timeout=30)  # the pipe is open for as long as the child lives


def test_a_run_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    with pytest.raises(SystemExit) as caught:
        compare.main([*config(tmp_path, "test_compare.Breaks"), "--steps=4", f"--out={out}"])
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert "lightning-bwdopt compare: the ordinary run ended with status 1:" in said
    assert "ArithmeticError: no third batch" in said
    assert [path.name for path in out.iterdir()] == ["ordinary.log"]


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"strategy": "ddp"}, [], "`strategy: ddp` cannot step in backward"),
        ({"num_nodes": 2}, [], "`num_nodes: 2`: the two runs are started on this machine alone"),
        ({}, ["--ckpt_path=some.ckpt"], "`--ckpt_path=some.ckpt` goes on with a run"),
        ({"accelerator": "gpu", "devices": -1}, [], "`devices: -1` is as many as the machine that trains has"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, options: dict[str, Any], arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ComparedCLI("ordinary", 2, tmp_path, [*config(tmp_path, "helpers.Lit", **options), *arguments])


def test_other_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    (tmp_path / ".runs-killed").mkdir()
    for out, message in (
        (tmp_path, "holds `thesis.txt`, which is no report of this command"),
        (tmp_path / "thesis.txt", "is a file. Pass a folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            compare.main(["--config=none.yaml", f"--out={out}"])
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".runs-killed", "thesis.txt"]


def test_arguments_are_checked_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--steps=0", f"--out={tmp_path / 'r'}"])
    assert "`--steps=0` is no number of steps" in capsys.readouterr().err
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        compare.main([f"--out={tmp_path / 'r'}"])
    assert "`lightning-bwdopt compare` draws with matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("ordinary", "in_backward", "expected"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]), 0.5),
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), math.inf),
        (torch.zeros(0, 3), torch.zeros(0, 3), 0.0),
        (torch.tensor([3, 4]), torch.tensor([3, 6]), 2.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16), 0.0078125),
        (0.1, 0.1 + 2**-50, 2**-50),
        (True, True, 0.0),
        ("(0.9, 0.95)", "(0.9, 0.99)", math.inf),
        (None, 1.0, math.inf),
    ],
)
def test_difference(ordinary: Any, in_backward: Any, expected: float) -> None:
    assert difference_of(ordinary, in_backward) == expected


def test_difference_is_found_in_the_last_chunk_and_in_what_is_missing() -> None:
    ones = torch.ones(2**22 + 3)
    other = ones.clone()
    other[-1] = 3.0
    assert difference_of(ones, other) == 2.0
    seen = Difference()
    seen.see_each({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0}, "rank 0")
    assert seen == Difference(0.5, "a, rank 0")
    seen.see_each({"a": 1.0}, {"a": 1.0, "c": 1.0}, "rank 1")
    assert seen == Difference(math.inf, "c, rank 1")
