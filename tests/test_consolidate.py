"""One file from a sharded folder, and from that the folder that `transformers` loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from checkpoint_runs import Plain, fit, ours, read, single
from examples.causal_lm import CausalLM
from helpers import assert_equal, run_distributed, seeded, trainer
from lightning_bwdopt import CheckpointError, consolidate, storage
from tiny_recipe import TINY

README = (Path(__file__).parents[1] / "README.md").read_text()


def write_folder(tmp: str) -> None:
    fit(ours("sharded"), seeded(Plain), ranks=2, save=f"file://{tmp}/folder")
    with pytest.raises(ValueError, match="`s3://bucket/folder` is not on the local file system.*Use `'full'`"):
        fit(ours("sharded"), seeded(Plain), ranks=2, save="s3://bucket/folder")


def test_one_file_from_a_folder(tmp_path: Path) -> None:
    run_distributed(write_folder, str(tmp_path))
    file = consolidate(f"file://{tmp_path}/folder", f"file://{tmp_path}/file.ckpt")
    assert file == tmp_path / "file.ckpt"
    whole = fit(single(enabled=False), seeded(Plain))
    for strategy in (single(), single(enabled=False)):
        assert_equal(fit(strategy, seeded(Plain), resume=file), whole)
    loaded = Plain.load_from_checkpoint(file)
    assert_equal(loaded.state_dict(), read(file)["state_dict"])
    # While another folder takes its name, in two steps, the old one waits under a name of its own.
    folder = tmp_path / "folder"
    folder.rename(storage.previous_path(folder))
    assert_equal(read(consolidate(folder, tmp_path / "again.ckpt")), read(file))
    (folder / "meta.pt").unlink()
    check_refused(folder, CheckpointError, "`.*folder` is not a complete checkpoint: it has no `meta.pt`")


def check_refused(source: Path, error: type[Exception], match: str) -> None:
    target = source.with_name("never.ckpt")
    with pytest.raises(error, match=match):
        consolidate(source, target)
    assert not target.exists()


def test_what_is_no_sharded_checkpoint(tmp_path: Path) -> None:
    check_refused(tmp_path / "missing", FileNotFoundError, "There is nothing at `.*missing`. Pass the folder")
    (tmp_path / "last.ckpt").touch()
    check_refused(tmp_path / "last.ckpt", CheckpointError, "`.*last.ckpt` is a file already.*Use it as it is")
    check_refused(tmp_path, CheckpointError, "no file in this folder is part of one. Pass the path of the checkpoint")


def train_language_model(tmp: str) -> dict[str, Any]:
    module = seeded(CausalLM, architecture=TINY, learning_rate=0.01)
    run = trainer(strategy=ours("sharded"), devices=2, max_steps=2)
    tokens = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(4, 16)]
    run.fit(module, DataLoader(tokens))
    run.save_checkpoint(f"{tmp}/last.ckpt")
    assert module.model is not None
    return {name: param.full_tensor().detach() for name, param in module.model.named_parameters()}  # type: ignore[attr-defined]


def test_folder_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = run_distributed(train_language_model, str(tmp_path))[0]
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "consolidate" in code)
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    assert (tmp_path / "model" / "model.safetensors").is_file()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal({name: param.detach() for name, param in exported.named_parameters()}, trained)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
