"""The optimizer in backward in a bare PyTorch loop: ``python -m examples.bare_loop``."""

from __future__ import annotations

import torch
from torch import nn

from lightning_bwdopt import OptimizerInBackward


def main(steps: int = 5, *, in_backward: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Trains a small model; ``in_backward=False`` is the ordinary loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    core = OptimizerInBackward(optimizer, units=[block.parameters() for block in model])
    if in_backward:
        core.attach()  # the one line that changes
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()  # steps
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    core.remove()
    return model, optimizer, losses


if __name__ == "__main__":
    print(*main()[2], sep="\n")
