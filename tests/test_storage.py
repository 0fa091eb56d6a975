"""Files and folders on the disk: at every moment there is the old one or the new one."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpoint_runs import Plain, fit, single
from helpers import assert_equal, seeded
from lightning_bwdopt import CheckpointError, storage
from lightning_bwdopt.checkpoint_files import FileCheckpointIO


class Died(BaseException):
    pass


def put(path: Path, kind: str, content: str) -> None:
    if kind == "folder":
        path.mkdir()
        path = path / "shard"
    path.write_text(content)


def content(path: Path) -> str:
    return (path / "shard" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("exchanges", [True, False], ids=["one step", "two steps"])
@pytest.mark.parametrize(("old", "new"), [("folder", "folder"), ("file", "folder"), ("folder", "file")])
@pytest.mark.parametrize("renames", range(4))
def test_death_between_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, renames: int, exchanges: bool
) -> None:
    path, users_own = tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt"
    put(path, old, "old")
    put(users_own, old, "user's own")
    put(storage.partial_path(path), new, "new")
    left = renames

    def rename(source: Path, target: Path, rename: Any = os.rename) -> None:
        nonlocal left
        if left == 0:
            raise Died
        left -= 1
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        if not exchanges:
            patch.setattr(storage, "_exchange", lambda *paths: False)
        died = False
        try:
            storage.publish(path)
        except Died:
            died = True
    assert died == (not exchanges and renames < 3)
    seen = [name for name in os.listdir(tmp_path) if not name.startswith(".") and name != users_own.name]
    assert seen == ["last.replaced-by-lightning_bwdopt.ckpt"] if died and renames == 1 else "last.ckpt" in seen

    storage.recover(path)
    assert content(path) == ("old" if died and renames < 2 else "new")

    storage.remove(storage.partial_path(path))
    put(storage.partial_path(path), new, "newer")
    storage.publish(path)
    assert content(path) == "newer"
    left_behind = {"last.replaced-by-lightning_bwdopt.ckpt"}
    assert set(os.listdir(tmp_path)) - left_behind == {"last.ckpt", users_own.name}
    assert content(users_own) == "user's own"


@pytest.mark.parametrize("exchanges", [True, False], ids=["one step", "two steps"])
@pytest.mark.parametrize("name", ["a" * 250 + ".ckpt", "\N{SNOWMAN}" * 83 + ".ckpt", "a." + "b" * 253], ids=len)
def test_names_as_long_as_a_file_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(storage, "_exchange", lambda *paths: False)
    path = tmp_path / name
    similar = [path, path.with_name(f"{name[:-1]}-")]
    assert len({*map(storage.partial_path, similar), *map(storage.previous_path, similar)}) == 4
    for kind in ("file", "folder", "folder"):
        put(storage.partial_path(path), kind, kind)
        storage.publish(path)
        assert content(path) == kind
        assert os.listdir(tmp_path) == [name]
    path.rename(storage.previous_path(path))
    storage.recover(path)
    assert os.listdir(tmp_path) == [name]
    storage.remove(path)
    storage.write_file(0, path)
    assert os.listdir(tmp_path) == [name]


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    storage.write_file("old", path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="`.*last.ckpt.partial` cannot be written; the disk may be full"):
            storage.write_file(torch.zeros(200_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.load(path) == "old"
    with pytest.raises(RuntimeError, match="of its own"):  # no failure to write
        storage.write_file(Unpicklable(), path)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("of its own")


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    for kind in ("file", "folder"):
        target, link = tmp_path / f"step_{kind}", tmp_path / f"last_{kind}"
        put(target, kind, "old")
        link.symlink_to(target)
        put(storage.partial_path(link), kind, "new")
        storage.publish(link)
        assert (content(link), content(target)) == ("new", "old")
        assert not link.is_symlink()
        link.unlink() if kind == "file" else storage.remove(link)
        link.symlink_to(target)
        storage.remove(link)
        assert content(target) == "old"
    assert sorted(os.listdir(tmp_path)) == ["step_file", "step_folder"]


def test_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/run/half.ckpt"
    whole = fit(single(), seeded(Plain), save=url)
    assert os.listdir(tmp_path) == ["run"]
    assert_equal(fit(single(), seeded(Plain), resume=url), whole)
    plugin = FileCheckpointIO()
    assert "state_dict" in plugin.load_checkpoint(url, weights_only=False)
    (tmp_path / "run" / "half.ckpt").write_text("cut sh")
    with pytest.raises(CheckpointError, match="it is cut short"):
        fit(single(), seeded(Plain), resume=url)
    plugin.remove_checkpoint(url)
    assert os.listdir(tmp_path / "run") == []


def test_last_finds_what_waited_for_its_name(tmp_path: Path) -> None:
    whole = fit(single(), seeded(Plain), save=storage.previous_path(tmp_path / "last.ckpt"))
    storage.partial_path(tmp_path / "last.ckpt").write_text("cut sh")
    callbacks = [ModelCheckpoint(tmp_path, save_top_k=0)]
    resumed = fit(single(), seeded(Plain), resume="last", callbacks=callbacks, enable_checkpointing=True)
    assert_equal(resumed, whole)
