"""The recipe from the command line to its results: mode on and off, and resuming."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from wandb.proto.wandb_internal_pb2 import Record

from examples.full_finetune import main
from helpers import assert_equal, run_distributed
from tiny_recipe import tiny_arguments

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
DISTRIBUTED = str(CONFIGS / "full_finetune_distributed.yaml")
SINGLE_DEVICE = str(CONFIGS / "full_finetune_single_device.yaml")
STEPS = 8


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["full_finetune"])  # LightningCLI warns of arguments beside `args`


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_arguments(tmp_path_factory.mktemp("tiny")), f"--trainer.limit_train_batches={STEPS}"]


def with_wandb(folder: Path, tiny: list[str]) -> list[str]:
    return [
        *("fit", "--config", DISTRIBUTED, *tiny),
        "--trainer.logger=lightning.pytorch.loggers.WandbLogger",
        "--trainer.logger.init_args.offline=true",
        f"--trainer.logger.init_args.save_dir={folder}",
    ]


def run_in_worker(args: list[str]) -> None:
    main(args)
    wandb.finish()


def checkpoint_of(folder: Path) -> dict[str, Any]:
    (summary,) = folder.rglob("summary.json")
    return torch.load(json.loads(summary.read_text())["checkpoint"], weights_only=False)


@pytest.fixture(scope="module")
def runs(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of two runs of the YAML on two ranks, with the mode on and off."""
    on, off = tmp_path_factory.mktemp("on"), tmp_path_factory.mktemp("off")
    # As a user starts it: Lightning launches the second rank itself.
    program = [sys.executable, "-m", "examples.full_finetune", *with_wandb(on, tiny)]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr
    (on / "output.txt").write_text(finished.stdout)
    (on / "errors.txt").write_text(finished.stderr)
    run_distributed(run_in_worker, [*with_wandb(off, tiny), "--trainer.strategy.init_args.enabled=false"])
    return {"on": on, "off": off}


def summary_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("summary.json")
    return json.loads(file.read_text())


def offline_history(folder: Path) -> list[dict[str, Any]]:
    """What an offline run logged: wandb keeps it in LevelDB's log format, in blocks of 32 KiB."""
    (file,) = folder.rglob("*.wandb")
    data, at, message = file.read_bytes(), 7, b""
    rows = []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(message)
            message = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def series(folder: Path, name: str) -> list[Any]:
    return [row[name] for row in offline_history(folder) if name in row]


# Mode on and off ----------------------------------------------------------------------------------------------------


def test_weights_and_optimizer_state_are_those_of_the_ordinary_run(runs: dict[str, Path]) -> None:
    on, off = checkpoint_of(runs["on"]), checkpoint_of(runs["off"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops"):
        assert_equal(on[part], off[part], part)


def test_wandb_shows_the_same_curves(runs: dict[str, Path]) -> None:
    for name, count in (("train_loss", STEPS), ("lr", STEPS), ("val_loss", 1), ("val_perplexity", 1)):
        curve = series(runs["on"], name)
        assert len(curve) == count, name
        assert curve == series(runs["off"], name), name
    assert len(series(runs["on"], "tokens_per_second")) == len(series(runs["on"], "peak_memory_mib")) == STEPS


def test_logged_rate_is_that_of_its_step(runs: dict[str, Path]) -> None:
    rates = series(runs["on"], "lr")
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])  # two steps of warm-up
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_summary_and_table(runs: dict[str, Path]) -> None:
    on, off = summary_of(runs["on"]), summary_of(runs["off"])
    assert list(on) == [
        "val_loss_before",
        "val_loss_after",
        "strategy",
        "steps",
        "tokens_per_second",
        "peak_memory_mib",
        "checkpoint",
    ]
    assert on["val_loss_after"] < on["val_loss_before"] - 1
    assert [on[name] for name in ("val_loss_before", "val_loss_after", "steps")] == [
        off[name] for name in ("val_loss_before", "val_loss_after", "steps")
    ]
    assert on["strategy"] == "FSDPOptimInBwdStrategy(enabled=True)"
    assert off["strategy"] == "FSDPOptimInBwdStrategy(enabled=False)"
    assert on["steps"] == STEPS
    assert on["tokens_per_second"] > 0
    assert on["peak_memory_mib"] > 100
    table = (runs["on"] / "output.txt").read_text()
    assert re.search(rf"held-out loss +{on['val_loss_before']:.4f} +{on['val_loss_after']:.4f}\n", table)
    assert "prompt                'The optimizer'" in table
    assert on["checkpoint"] in table
    assert table.count("held-out loss") == 1  # the first rank's only


def test_progress_bar_shows_the_figures(runs: dict[str, Path]) -> None:
    bar = (runs["on"] / "errors.txt").read_text() + (runs["on"] / "output.txt").read_text()
    for name, figure in (
        ("train_loss", r"\d\.\d+"),
        ("lr", r"[\d.e-]+"),
        ("tokens_per_second", r"\d+"),
        ("peak_memory_mib", r"\d+"),
    ):
        assert re.search(rf"{name}={figure}[,\]]", bar), name


def test_tied_weights_step_once_and_stay_tied(runs: dict[str, Path]) -> None:
    checkpoint = checkpoint_of(runs["on"])
    weights = checkpoint["state_dict"]
    assert_equal(weights["model.lm_head.weight"], weights["model.model.embed_tokens.weight"])
    (optimizer,) = checkpoint["optimizer_states"]
    assert len(optimizer["state"]) == len(weights) - 1
    assert {entry["step"].item() for entry in optimizer["state"].values()} == {STEPS}


def test_transformers_loads_the_result(runs: dict[str, Path]) -> None:
    weights = checkpoint_of(runs["on"])["state_dict"]
    folder = Path(summary_of(runs["on"])["checkpoint"]).parent / "transformers"
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert {"lm_head.weight"} == {name.removeprefix("model.") for name in weights} - set(stored.keys())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal({f"model.{name}": value for name, value in model.state_dict().items()}, dict(weights))
    assert AutoTokenizer.from_pretrained(folder).decode(model.config.eos_token_id) == "<|end|>"


# Resume -------------------------------------------------------------------------------------------------------------


def resumable(folder: Path, tiny: list[str], config: str) -> list[str]:
    return [
        *("fit", "--config", config, *tiny),
        # Lightning's checkpoints do not hold the state of random numbers.
        "--model.init_args.architecture.attention_dropout=0",
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=4",
        f"--trainer.logger.init_args.save_dir={folder}",
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--trainer.callbacks.init_args.dirpath={folder / 'steps'}",
        "--trainer.callbacks.init_args.filename={step}",
        "--trainer.callbacks.init_args.every_n_train_steps=3",
        "--trainer.callbacks.init_args.save_top_k=-1",
    ]


def assert_same_end(whole: Path, resumed: Path) -> None:
    expected, actual = checkpoint_of(whole), checkpoint_of(resumed)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_equal(actual[part], expected[part], part)
    assert expected["global_step"] == 8
    assert summary_of(resumed)["val_loss_before"] == summary_of(whole)["val_loss_before"]


def test_resume_within_the_second_epoch_on_two_ranks(tiny: list[str], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    named = "--trainer.strategy=fsdp_optim_in_bwd"
    run_distributed(main_quietly, [*resumable(whole, tiny, DISTRIBUTED), named])
    checkpoint = f"--ckpt_path={whole / 'steps' / 'step=6.ckpt'}"
    run_distributed(main_quietly, [*resumable(resumed, tiny, DISTRIBUTED), named, checkpoint])
    assert_same_end(whole, resumed)


def main_quietly(args: list[str]) -> None:
    main(args)  # its result cannot travel between processes


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resume_within_the_first_epoch_on_one_device(tiny: list[str], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    main(resumable(whole, tiny, SINGLE_DEVICE))
    main([*resumable(resumed, tiny, SINGLE_DEVICE), f"--ckpt_path={whole / 'steps' / 'step=3.ckpt'}"])
    assert_same_end(whole, resumed)


def test_training_that_ends_between_validations_is_validated(tiny: list[str], tmp_path: Path) -> None:
    cli = main(
        [
            *("fit", "--config", SINGLE_DEVICE, *tiny),
            "--trainer.max_steps=3",
            f"--trainer.logger.init_args.save_dir={tmp_path}",
            "--trainer.strategy=single_device_optim_in_bwd",
        ]
    )
    summary = summary_of(tmp_path)
    assert summary["steps"] == 3
    assert summary["val_loss_after"] == cli.trainer.callback_metrics["val_loss"].item()
    assert summary["val_loss_after"] < summary["val_loss_before"]
