"""The strategies, and their names for ``Trainer(strategy=…)``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_bwdopt.fsdp import FSDPOptimInBwdStrategy
from lightning_bwdopt.single_device import SingleDeviceOptimInBwdStrategy

__all__ = ["FSDPOptimInBwdStrategy", "SingleDeviceOptimInBwdStrategy", "register_strategies"]


def register_strategies() -> None:
    """Makes the names known; importing the package does it."""
    for strategy in (FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy):
        if strategy.strategy_name not in StrategyRegistry:  # a second import under another name must not fail
            strategy.register_strategies(StrategyRegistry)
