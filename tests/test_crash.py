"""Runs that are killed with SIGKILL continue from their newest checkpoint as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import crash_test


def test_killed_three_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--kills", "3", "--width", "128", "--seed", "1", "--json", str(file)]
    assert crash_test.main(arguments) == 0, capsys.readouterr().out
    for result, way in zip(json.loads(file.read_text()), ("file", "folder"), strict=True):
        assert result["way"] == way
        assert result["complete"]
        assert [row["killed while"] for row in result["kills"]] == ["saving", "training", "saving"]
        assert all(row["resumed at"] > 0 and row["equal"] > 0 for row in result["kills"])
    assert "every continued run equals the unbroken one" in capsys.readouterr().out
