"""The optimizer in the backward pass for PyTorch Lightning and FSDP2."""

from importlib.metadata import version

from lightning_bwdopt.mixin import OptimInBwdMixin
from lightning_bwdopt.optimizer import OptimizerInBackward
from lightning_bwdopt.rates import get_lr
from lightning_bwdopt.strategies import (
    FSDPOptimInBwdStrategy,
    SingleDeviceOptimInBwdStrategy,
    register_strategies,
)

__all__ = [
    "FSDPOptimInBwdStrategy",
    "OptimInBwdMixin",
    "OptimizerInBackward",
    "SingleDeviceOptimInBwdStrategy",
    "get_lr",
]
__version__ = version("lightning_bwdopt")

register_strategies()
