"""The benchmark's figures at toy size: that they are there and of the right shape, never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import benchmark
from examples.benchmark_models import SCENARIOS
from examples.benchmark_tables import growth, summarize, table
from examples.benchmark_ways import ORDINARY, WAYS, Unavailable
from helpers import run_distributed


def check_row(row: dict[str, Any]) -> None:
    for kind in ("step", "cpu", "optimizer", "alone"):
        for figure in (row[f"{kind}_ms"], row[f"{kind}_ratio"]):
            assert list(figure) == ["median", "low", "high"]
            assert 0 < figure["low"] <= figure["median"] <= figure["high"]


def test_prints_a_table_and_writes_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ways = ["ordinary again", "in backward, unit", "hooks, fused", "in backward, clipped"]
    file = tmp_path / "out.json"
    arguments = ["--scenarios", "toy", "--ranks", "1", "--rounds", "2", "--json", str(file), "--ways", *ways]
    report = benchmark.main(arguments)
    assert json.loads(file.read_text()) == report
    (result,) = report["results"]
    assert (result["scenario"], result["ranks"], result["rounds"]) == ("toy", 1, 2)
    assert list(result["ways"]) == [ORDINARY, *ways]
    for row in result["ways"].values():
        check_row(row)
    assert result["ways"][ORDINARY]["step_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert list(result["pairs"]) == [
        "in backward, unit / hooks, fused",
        "in backward, clipped / in backward, unit",
    ]
    told = capfd.readouterr().out
    assert "toy, one process" in told
    assert "in backward, unit / hooks, fused" in told
    assert all(way in told for way in ways)


def check_two_ranks(ways: list[str]) -> None:
    times = benchmark.measure_times(SCENARIOS["toy"], ways, 2, torch.device("cpu"))
    results = summarize(times)
    for row in results.values():
        check_row(row)
    # Four matrices of 8x8 in two blocks, halved: all of them wait for an ordinary step, one unit in backward.
    assert results[ORDINARY]["gradient_mib"] == 4 * 8 * 8 * 4 / 2 / benchmark.MIB
    assert results["in backward, unit"]["gradient_mib"] == results[ORDINARY]["gradient_mib"] / 2


def test_two_ranks() -> None:
    run_distributed(check_two_ranks, [ORDINARY, "in backward, unit", "in backward, parameter", "hooks, fused"])


def test_every_way_trains_to_the_same_weights() -> None:
    weights: dict[str, list[torch.Tensor]] = {}
    for way in WAYS:
        if "clipped" in way or way == "optimi":  # another result, or another AdamW
            continue
        try:
            run = benchmark.Run(way, SCENARIOS["toy"], torch.device("cpu"))
        except Unavailable:
            continue
        for _ in range(3):
            run.step()
        weights[way] = [p.detach() for p in run.model.parameters()]
    assert {ORDINARY, "in backward, unit", "in backward, parameter", "in backward, norm", "hooks, fused"} <= set(
        weights
    )
    for way, found in weights.items():
        exact = {} if way in ("ordinary for-loop", "torchtune, default") else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(found, weights[ORDINARY], **exact, msg=lambda text, way=way: f"{way}: {text}")


def test_memory_rises_by_the_gradients_and_a_way_that_fails_is_named() -> None:
    run = benchmark.Run(ORDINARY, SCENARIOS["toy"], torch.device("cpu"))
    run.step()
    assert run.live_gradients() == 4 * 8 * 8 * 4 / benchmark.MIB
    assert run.time_optimizer() > 0
    assert benchmark.measure_memory(SCENARIOS["toy"], "in backward, unit", torch.device("cpu")) >= 0

    class Missing(WAYS[ORDINARY]):  # type: ignore[misc,valid-type]
        def attach(self, *_: Any) -> None:
            raise Unavailable("not installed")

    WAYS["missing"] = Missing
    try:
        times = benchmark.measure_times(SCENARIOS["toy"], [ORDINARY, "missing"], 1, torch.device("cpu"))
    finally:
        del WAYS["missing"]
    assert times["missing"] == {"skipped": "not installed"}
    assert "missing: skipped, not installed" in table("toy", 1, summarize(times), {})


def test_growth_compares_like_with_like() -> None:
    def result(scenario: str, ranks: int, milliseconds: float) -> dict[str, Any]:
        times = {"step_ms": {"median": milliseconds}, "optimizer_ms": {"median": milliseconds / 4}}
        ways = {ORDINARY: times, "optimi": {"skipped": "why"}}
        return {"scenario": scenario, "ranks": ranks, "ways": ways}

    measured = [result("many-small", 1, 2.0), result("many-small", 2, 3.0), result("many-small-x10", 1, 21.0)]
    assert growth(measured) == {"ordinary fused, 1 rank(s)": {"step": 10.5, "optimizer": 10.5}}
