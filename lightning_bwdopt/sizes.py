"""Sizes of memory as people write and read them."""

from __future__ import annotations

import re
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of memory, such as MiB."""

    name: str
    bytes: int


_UNITS = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))


def unit_of(size: float, at_least: float = 1) -> Unit:
    """The largest unit that there are so many of in ``size`` bytes; KiB when there is none."""
    return next((unit for unit in _UNITS if abs(size) >= at_least * unit.bytes), _UNITS[-1])


def in_words(size: float) -> str:
    """Bytes with their unit, such as ``5.4 GiB``."""
    unit = unit_of(size)
    return f"{size / unit.bytes:.1f} {unit.name}"


def parse(text: str) -> int:
    """Reads a size such as ``24GiB``, ``80GB`` or ``512MiB``, in bytes.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])(i?)B", text)
    if not match:
        raise ValueError(f"`{text}` is no size. Write `24GiB` or `80GB`.")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
