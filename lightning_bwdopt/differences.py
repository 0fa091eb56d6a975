"""How far apart the numbers of two runs are, element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**22  # elements that are compared at a time


@dataclass
class Difference:
    """The largest difference that was seen; infinite where one run lacks what the other has."""

    largest: float = 0.0
    where: str = ""

    def see(self, difference: float, where: str) -> None:
        """Keeps the largest."""
        if difference > self.largest:
            self.largest, self.where = difference, where

    def see_each(self, ordinary: Mapping[str, Any], in_backward: Mapping[str, Any], place: str) -> None:
        """Looks at the entries that have one name."""
        for name in {**ordinary, **in_backward}:
            both = name in ordinary and name in in_backward
            self.see(difference_of(ordinary[name], in_backward[name]) if both else math.inf, f"{name}, {place}")


def difference_of(ordinary: Any, in_backward: Any) -> float:
    """The largest difference between two tensors' elements, or two numbers; infinite when they are not comparable."""
    if isinstance(ordinary, Tensor) and isinstance(in_backward, Tensor):
        if ordinary.shape != in_backward.shape or ordinary.dtype != in_backward.dtype:
            return math.inf
        pairs = zip(ordinary.reshape(-1).split(_CHUNK), in_backward.reshape(-1).split(_CHUNK), strict=True)
        return max((_chunk_difference(a, b) for a, b in pairs), default=0.0)
    if isinstance(ordinary, int | float) and isinstance(in_backward, int | float):
        return _chunk_difference(*(torch.tensor([x], dtype=torch.float64) for x in (ordinary, in_backward)))
    return 0.0 if ordinary == in_backward else math.inf


def _chunk_difference(a: Tensor, b: Tensor) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    return apart.max().item() if apart.numel() else 0.0
