"""What the recipe is given: bad input, the model of the default, the YAML files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch._subclasses import FakeTensorMode

from examples.causal_lm import CausalLM
from examples.errors import InputError
from examples.full_finetune import main
from examples.hf_models import load_pretrained
from tiny_recipe import tiny_arguments

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
DISTRIBUTED = str(CONFIGS / "full_finetune_distributed.yaml")
SINGLE_DEVICE = str(CONFIGS / "full_finetune_single_device.yaml")
FILES = [pytest.param(path, id=path.stem) for path in sorted(CONFIGS.glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["full_finetune"])  # LightningCLI warns of arguments beside `args`


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_arguments(tmp_path_factory.mktemp("tiny"))


def test_unknown_strategy_argument(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", DISTRIBUTED, *tiny, "--trainer.strategy.init_args.enabld=true"])
    message = capsys.readouterr().err
    assert "`enabld` is no argument of `lightning_bwdopt.FSDPOptimInBwdStrategy`" in message
    assert "`enabled`, " in message
    assert "usage:" not in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, r"`.*a\.txt` does not exist: correct `path`"),
        ("a.txt", "", r"`.*a\.txt` is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', r"`.*a\.jsonl`, line 2: `{\"text\"` is not JSON"),
        ("a.txt", "short", r"`.*a\.txt` has `6` tokens.*lower `sequence_length`"),
    ],
    ids=["missing", "empty", "malformed", "short"],
)
def test_bad_data(tiny: list[str], tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    args = ["fit", "--config", SINGLE_DEVICE, *tiny, f"--data.init_args.path={tmp_path / name}"]
    with pytest.raises(SystemExit, match=message):
        main([*args, f"--trainer.logger.init_args.save_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrained=./nowhere"], r"`\./nowhere` does not exist on this machine and is no hub id"),
        (["pretrained=nowhere.gguf"], r"`nowhere\.gguf` does not exist"),
        (["pretrained={here}"], "`{here}` has no `config.json`"),
        (["pretrained={here}/notes.md"], r"`{here}/notes\.md` is a file that is not a `\.gguf`"),
        (["pretrained=a/b", "architecture.model_type=llama"], "`pretrained: a/b` and `architecture` are both given"),
        (["architecture.model_type=lama"], "`model_type: lama`.*`llama`"),
    ],
    ids=["path", "gguf", "folder", "file", "both", "architecture"],
)
def test_bad_model(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "notes.md").touch()
    overrides = [f"--model.init_args.{argument.format(here=tmp_path)}" for argument in arguments]
    # Random tokens: nothing else that could fail first.
    data = ["--data=examples.full_finetune.RandomTokenDataModule", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    with pytest.raises(SystemExit, match=message.replace("{here}", re.escape(str(tmp_path)))):
        main(["fit", "--config", SINGLE_DEVICE, *overrides, *data])


def test_error_is_told_once_before_the_other_rank_starts(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    # Python prints the text of a `SystemExit`, and no traceback, and ends with the status 1.
    with pytest.raises(SystemExit, match="^error: The data file `nowhere.txt` does not exist"):
        main(["fit", "--config", DISTRIBUTED, *tiny, "--data.init_args.path=nowhere.txt"])
    told = capfd.readouterr()  # by any process
    assert "does not exist" not in told.out + told.err
    assert "Traceback" not in told.err
    assert "GLOBAL_RANK" not in told.err
    assert not torch.distributed.is_initialized()


def test_code_of_a_model_does_not_run_unasked(tmp_path: Path) -> None:
    reference = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": reference}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    message = f"`{re.escape(str(tmp_path))}` could not be loaded.*`trust_remote_code: true`"
    with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
        load_pretrained(str(tmp_path))
    assert not (tmp_path / "ran").exists()


# The model of the default, and the YAML files -----------------------------------------------------------------------


def test_default_model_is_read_from_the_installed_wheel() -> None:
    module = CausalLM()
    module.configure_model()
    assert module.model is not None
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert module.model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in module.parameters()) == 134_515_008
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.tokenizer is not None
    prompt = "The capital of France is"
    module.new_tokens = 4
    with torch.no_grad():
        assert "Paris" in module._continue(module.tokenizer, prompt)


@pytest.mark.parametrize("path", FILES)
def test_every_key_is_commented(path: Path) -> None:
    lines = path.read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if re.fullmatch(r" *(- )?\w+: \S.*", line)]
    assert keys
    for index in keys:
        if "class_path" not in lines[index]:
            assert lines[index - 1].lstrip().startswith("# "), f"{path.name}:{index + 1}: {lines[index]}"


@pytest.mark.parametrize("path", FILES)
def test_any_lightning_cli_reads_the_file(path: Path) -> None:
    cli = LightningCLI(args=["--config", str(path), "--trainer.accelerator=cpu"], run=False)
    assert cli.trainer.strategy.enabled is True
    assert type(cli.model) is CausalLM


def test_large_example_is_llama_2_7b() -> None:
    config = str(CONFIGS / "llama2_7b.yaml")
    cli = LightningCLI(args=["--config", config, "--trainer.accelerator=cpu"], run=False)
    with FakeTensorMode():
        cli.model.configure_model()
    assert sum(parameter.numel() for parameter in cli.model.parameters()) == 6_738_415_616
    (policy,) = cli.trainer.strategy.activation_checkpointing_policy
    assert sum(type(module) is policy for module in cli.model.modules()) == 32
    cli.datamodule.setup("fit")
    batch = next(iter(cli.datamodule.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 1024)
