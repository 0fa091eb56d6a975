"""What `benchmark.py` makes of its times: medians, paired ratios, tables."""

from __future__ import annotations

import statistics
from typing import Any

from examples.benchmark_ways import ORDINARY

# Ways that are also compared with another one than the ordinary: what this package promises.
PAIRS = (
    ("in backward, unit", "torchtune, fused"),
    ("in backward, unit", "hooks, fused"),
    ("in backward, unit", "optimi"),
    ("in backward, norm", "in backward, unit"),
    ("in backward, clipped", "in backward, unit"),
)


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def summarize(times: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles of times and of their ratios, round by round, to the ordinary fused optimizer."""
    base = times[ORDINARY]
    results: dict[str, Any] = {}
    for way, entry in times.items():
        results[way] = row = {key: value for key, value in entry.items() if not isinstance(value, list)}
        for kind, values in entry.items():
            if isinstance(values, list):
                row[f"{kind}_ms"] = summary(values)
                row[f"{kind}_ratio"] = summary([value / other for value, other in zip(values, base[kind], strict=True)])
    return results


def pairs(times: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles of the ratios, round by round, of the pairs of ways that were measured."""
    found: dict[str, Any] = {}
    for way, base in PAIRS:
        if "step" in times.get(way, {}) and "step" in times.get(base, {}):
            found[f"{way} / {base}"] = {
                kind: summary([a / b for a, b in zip(times[way][kind], times[base][kind], strict=True)])
                for kind in ("step", "cpu", "optimizer")
            }
    return found


def growth(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By how much a way's step, and the optimizer in it, grow from 288 to 2,880 small parameters, where both ran."""
    medians: dict[str, dict[str, dict[str, float]]] = {"many-small": {}, "many-small-x10": {}}
    for result in results:
        for way, row in result["ways"].items():
            if result["scenario"] in medians and "step_ms" in row:
                times = {kind: row[f"{kind}_ms"]["median"] for kind in ("step", "optimizer")}
                medians[result["scenario"]][f"{way}, {result['ranks']} rank(s)"] = times
    small, large = medians.values()
    return {
        key: {kind: round(large[key][kind] / value, 2) for kind, value in small[key].items()}
        for key in small.keys() & large.keys()
    }


def table(scenario: str, ranks: int, results: dict[str, Any], paired: dict[str, Any]) -> str:
    """The results of one scenario as text, aligned."""
    place = "one process" if ranks == 1 else f"{ranks} ranks, FSDP2"
    head = ["", "step ms", "x ordinary", "its CPU ms", "x ordinary", "optimizer ms", "x ordinary"]
    head += ["alone ms", "x ordinary", "gradients MiB", "memory MiB", "save ms"]
    rows = [head]
    notes = []
    for way, row in results.items():
        if "skipped" in row:
            notes.append(f"{way}: skipped, {row['skipped']}")
            continue
        rows.append(
            [way, cell(row, "step_ms", 1), cell(row, "step_ratio", 2, True)]
            + [cell(row, "cpu_ms", 1), cell(row, "cpu_ratio", 2, True), cell(row, "optimizer_ms", 1)]
            + [cell(row, "optimizer_ratio", 2, True), cell(row, "alone_ms", 1), cell(row, "alone_ratio", 2, True)]
            + [cell(row, "gradient_mib", 1), cell(row, "memory_mib", 1), cell(row, "save_ms", 0)]
        )
    lines = [f"{scenario}, {place}", *_aligned(rows), *notes, ""]
    if paired:
        kinds = ("step", "cpu", "optimizer")
        rows = [["", "step", "its CPU time", "optimizer"]]
        rows += [[name, *(cell(row, kind, 2, True) for kind in kinds)] for name, row in paired.items()]
        lines += [*_aligned(rows), ""]
    return "\n".join(lines)


def cell(row: dict[str, Any], key: str, digits: int, spread: bool = False) -> str:
    """One figure, or a median with its quartiles."""
    if key not in row:
        return "-"
    if not isinstance(row[key], dict):
        return f"{row[key]:.{digits}f}"
    value = row[key]
    around = f" ({value['low']:.{digits}f}-{value['high']:.{digits}f})" if spread else ""
    return f"{value['median']:.{digits}f}{around}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
