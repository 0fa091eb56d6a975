"""Whether compiling a unit's step pays: AdamW on nine matrices of 64x64, the fused kernel beside a compiled step.

    python -m examples.compiled_step

Prints what the compilation takes, the shortest of many steps, and the largest difference between the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def adamw(**options: Any) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """The same weights and gradients each time."""
    torch.manual_seed(0)
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(9)]
    for param in params:
        param.grad = torch.randn(64, 64)
    return params, torch.optim.AdamW(params, lr=1e-4, **options)


def shortest(step: Callable[[], Any], repeats: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main(repeats: int = 300) -> dict[str, float]:
    """Measures, prints and returns the figures."""
    torch.set_num_threads(1)
    fused_params, fused = adamw(fused=True)
    compiled_params, optimizer = adamw(foreach=True)  # what compiles into few kernels
    compiled = torch.compile(optimizer.step)
    start = time.perf_counter()
    compiled()
    figures = {"compile_s": time.perf_counter() - start}
    fused.step()
    figures["fused_ms"] = shortest(fused.step, repeats)
    figures["compiled_ms"] = shortest(compiled, repeats)
    pairs = zip(fused_params, compiled_params, strict=True)
    figures["largest_difference"] = max((a - b).abs().max().item() for a, b in pairs)
    for name, value in figures.items():
        print(f"{name} {value:.3g}")
    return figures


if __name__ == "__main__":
    main()
