"""Arrows point down: what is plain torch imports nothing of Lightning, and no module imports one that imports it."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_bwdopt"
TORCH_ONLY = [
    "arguments",
    "attached",
    "clipping",
    "counters",
    "differences",
    "first_state",
    "loading",
    "matching",
    "memory",
    "misfits",
    "optimizer",
    "passes",
    "policies",
    "process_memory",
    "rates",
    "refusals",
    "selfcheck",
    "sharding",
    "states",
    "timeline",
    "trials",
    "units",
    "views",
]


def imported(module: str, *, types_too: bool) -> set[str]:
    """What a module imports when it is imported; with ``types_too`` also for annotations."""
    body = ast.parse((PACKAGE / f"{module}.py").read_text()).body
    if not types_too:
        body = [node for node in body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    names: set[str] = set()
    for node in (inner for top in body for inner in ast.walk(top)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "lightning_bwdopt":
            names.update(f"lightning_bwdopt.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def own(module: str) -> set[str]:
    """The modules of this package that it needs to be imported."""
    prefix = "lightning_bwdopt."
    found = {name.removeprefix(prefix) for name in imported(module, types_too=False) if name.startswith(prefix)}
    return {name for name in found if (PACKAGE / f"{name}.py").exists()}


def test_torch_only_modules() -> None:
    for module in TORCH_ONLY:
        foreign = {name for name in imported(module, types_too=True) if name.split(".")[0] == "lightning"}
        assert not foreign, f"{module}.py imports {foreign}"
        assert own(module) <= set(TORCH_ONLY), f"{module}.py imports {own(module) - set(TORCH_ONLY)}"


def test_no_circles() -> None:
    modules = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__"}
    assert {"cli", "mode", "optimizer"} <= modules
    order = list(TopologicalSorter({module: own(module) for module in modules}).static_order())
    assert order.index("views") < order.index("optimizer") < order.index("mode") < order.index("strategies")


def test_checkpoints_of_torch_are_imported_only_when_one_is_saved() -> None:
    """That import takes as long as the package's whole rest."""
    code = "import sys, lightning, lightning_bwdopt; print('torch.distributed.checkpoint' in sys.modules)"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
