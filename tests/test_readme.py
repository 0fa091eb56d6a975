"""README's snippets run, its commands exist, its tables are complete."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import FSDPStrategy

from examples.full_finetune import main
from lightning_bwdopt import FSDPOptimInBwdStrategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
# The one that needs a checkpoint is run by `test_consolidate.py`.
PYTHON = [code for language, code in SNIPPETS if language == "python" and "consolidate" not in code]
COMMANDS = [
    line.split("#")[0].strip()
    for language, code in SNIPPETS
    if language == "bash"
    for line in code.replace("\\\n", " ").splitlines()
]


@pytest.mark.filterwarnings("default")
def test_python_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PYTHON) == 4
    monkeypatch.chdir(tmp_path)
    for number, code in enumerate(PYTHON):
        assert re.search(r"^(from|import) lightning_bwdopt\b", code, flags=re.MULTILINE)  # this process has it already
        (tmp_path / f"snippet_{number}.py").write_text(code)
        runpy.run_path(f"snippet_{number}.py", run_name=f"snippet_{number}")
    assert (tmp_path / "lightning_logs").exists()  # the first one trained


def test_make_targets_and_pip_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert set(targets) == {"demo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    extras = [extra for command in COMMANDS for extra in re.findall(r"\.\[(\w+)\]", command)]
    assert extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE)


def test_the_demo_ends_with_where_to_see_the_memory() -> None:
    (recipe,) = re.findall(r"^demo: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    ending = recipe.split("The memory of this run")[1]
    for way in ("lightning-bwdopt estimate ", "callbacks.MemoryTimeline", "lightning-bwdopt compare "):
        assert way in ending


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    kinds = (
        "make ",
        "pip install -c constraints.txt ",
        "python -m examples.full_finetune fit ",
        "lightning-bwdopt estimate ",  # tests/test_memory.py runs this one
        "lightning-bwdopt compare ",  # tests/test_compare.py
    )
    assert all(command.startswith(kinds) for command in COMMANDS), COMMANDS


def test_recipe_command_is_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in COMMANDS if "examples.full_finetune" in command]
    python, option, module, *arguments = command.split()
    assert (python, option, module) == ("python", "-m", "examples.full_finetune")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["full_finetune"])  # LightningCLI warns of arguments beside `args`
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--print_config"])
    assert not end.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["init_args"]["path"] == "my.jsonl"
    assert config["model"]["init_args"]["pretrained"] == "MODEL_FOLDER"


def test_yaml_snippet_makes_the_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = [code for language, code in SNIPPETS if language == "yaml"]
    file = tmp_path / "config.yaml"
    file.write_text(snippet)
    monkeypatch.setattr(sys, "argv", ["program"])
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(LightningModule, run=False, seed_everything_default=1, args=[f"--config={file}", *options])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, FSDPOptimInBwdStrategy)
    assert strategy.enabled
    assert strategy._save_distributed_checkpoint


def table(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_each_fsdp_argument_is_taken_or_answered() -> None:
    theirs = {name for name in inspect.signature(FSDPStrategy).parameters if name not in ("self", "kwargs")}
    theirs |= set(inspect.signature(torch.distributed.fsdp.FullyShardedDataParallel).parameters)
    theirs -= {"module", "self"}
    ours = inspect.signature(FSDPOptimInBwdStrategy).parameters
    rows = table("Coming from `FSDPStrategy`")
    for name in theirs:
        assert f"`{name}" in rows, f"`{name}` has no row"
        if name not in ours:
            with pytest.raises(TypeError, match=rf"`{name}` is an argument of `FSDPStrategy`"):
                FSDPOptimInBwdStrategy(**{name: None})


def test_torchtune_rows_name_real_options() -> None:
    from lightning.pytorch import Trainer

    rows = table("Coming from torchtune")
    for name in re.findall(r"`trainer\.(\w+)", rows):
        assert name in inspect.signature(Trainer).parameters
    strategy = inspect.signature(FSDPOptimInBwdStrategy).parameters
    for name in re.findall(r"strategy's `(\w+)", rows):
        assert name in strategy
