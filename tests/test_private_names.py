"""The private names of torch and Lightning that docs/limits.md lists: each is there and used, and there is no other."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "docs" / "limits.md").read_text().split("## Private names\n")[1]
LISTED = [
    (owner, name)
    for owner, names in re.findall(r"^- `([\w.]+)`: ((?:`\w+`(?:,\s+)?)+)$", SECTION, flags=re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
]
TREES = {file.stem: ast.parse(file.read_text()) for file in (ROOT / "lightning_bwdopt").glob("*.py")}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]
OF_PYTHON = {"_fields", "_replace", "_abc_impl"}  # of a `NamedTuple`, of an abstract class


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def resolve(path: str) -> Any:
    """The module, class or function that a dotted path names."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def has(owner: Any, name: str) -> bool:
    """An attribute, a module of a package, or what instances get: the source of the class or the module sets it."""
    if hasattr(owner, name) or (hasattr(owner, "__path__") and find_spec(f"{owner.__name__}.{name}")):
        return True
    sources = [kind for kind in owner.__mro__ if kind is not object] if isinstance(owner, type) else [owner]
    return any(re.search(rf"\b{name}\b", source_of(source)) for source in sources)


@cache
def source_of(thing: Any) -> str:
    return inspect.getsource(thing)


def used() -> Iterator[str]:
    """Private names in the package: attributes, also by `getattr` and its like, and imports."""
    for node in NODES:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield ast.unparse(node.args[1]).strip("'")
        elif isinstance(node, ast.ImportFrom) and not f"{node.module}".startswith("lightning_bwdopt"):
            yield from (part for alias in node.names for part in f"{node.module}.{alias.name}".split("."))


def defined() -> Iterator[str]:
    """Names that the package gives: functions, classes, variables, and attributes of ``self``."""
    for node in NODES:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def inherited() -> Iterator[str]:
    """Private names that a class of the package gives or sets and that a parent elsewhere has, too."""
    for module in TREES:
        if module.startswith("__"):
            continue
        for kind in vars(importlib.import_module(f"lightning_bwdopt.{module}")).values():
            if not isinstance(kind, type) or kind.__module__ != f"lightning_bwdopt.{module}":
                continue
            own = {*vars(kind), *re.findall(r"self\.(_\w+) = ", inspect.getsource(kind))}
            foreign = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("torch", "lightning")]
            yield from (name for name in own if is_private(name) and any(has(base, name) for base in foreign))


USED = set(filter(is_private, used()))


@pytest.mark.parametrize(("owner", "name"), LISTED)
def test_each_listed_name_is_there_and_used(owner: str, name: str) -> None:
    assert has(resolve(owner), name), f"`{owner}` has no `{name}` in the installed version"
    assert name in USED, f"nothing uses `{name}`"


def test_no_other_private_name_is_used() -> None:
    listed = {part for owner, name in LISTED for part in (*owner.split("."), name)}
    assert len(LISTED) == len(set(LISTED)) > 50
    foreign = (USED - set(defined()) | set(inherited())) - OF_PYTHON
    assert foreign <= listed, f"docs/limits.md does not list {sorted(foreign - listed)}"
