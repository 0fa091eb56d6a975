"""The optimizer in the backward pass for PyTorch Lightning and FSDP2."""

from importlib.metadata import version

from lightning_bwdopt.checkpoint_errors import CheckpointError
from lightning_bwdopt.consolidation import consolidate
from lightning_bwdopt.loading import load_pretrained
from lightning_bwdopt.mixin import OptimInBwdMixin
from lightning_bwdopt.optimizer import OptimizerInBackward
from lightning_bwdopt.rates import get_lr
from lightning_bwdopt.strategies import (
    FSDPOptimInBwdStrategy,
    SingleDeviceOptimInBwdStrategy,
    register_strategies,
)

__all__ = [
    "CheckpointError",
    "FSDPOptimInBwdStrategy",
    "OptimInBwdMixin",
    "OptimizerInBackward",
    "SingleDeviceOptimInBwdStrategy",
    "consolidate",
    "get_lr",
    "load_pretrained",
]
__version__ = version("lightning_bwdopt")

register_strategies()
