"""Checkpoints of Lightning's `FSDPStrategy` (FSDP1): full ones in both directions, sharded ones are read."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from checkpoint_runs import Plain, fit, ours, read, single
from helpers import Block, assert_equal, run_distributed, seeded


class OnCPU(FSDPStrategy):
    """Lightning's, on a CPU.

    That one has FSDP1 copy tensors to the host. On a CPU the copy would be the tensor itself, whose memory is freed
    (parameters) or used again (states).
    """

    def __init__(self, kind: Literal["full", "sharded"] = "full") -> None:
        super().__init__(auto_wrap_policy={Block}, process_group_backend="gloo", state_dict_type=kind)

    def _setup_model(self, model: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    def _reading_state(self) -> AbstractContextManager[Any]:
        configs: Any = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        kind = StateDictType.SHARDED_STATE_DICT
        if self._state_dict_type == "full":
            configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
            kind = StateDictType.FULL_STATE_DICT
        for config in configs:
            config.offload_to_cpu = False
        return FullyShardedDataParallel.state_dict_type(self.model, kind, *configs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._reading_state():
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        with self._reading_state():
            state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
        if self._state_dict_type == "full" and self.global_rank == 0:
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
        return state


class ByName(Plain):
    """Two groups by name, for the shards of FSDP1 have one dimension; neither is in the order of the model."""

    def configure_optimizers(self) -> Any:
        norms, others = ([p for n, p in self.named_parameters() if ("norm" in n) == norm] for norm in (True, False))
        groups = [{"params": norms[::-1], "lr": 3e-3}, {"params": others[::-1], "lr": 1e-2}]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / self.warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def in_order(seen: dict[str, Any]) -> dict[str, Any]:
    """FSDP1 writes states by unit, and that order stays; it means nothing."""
    return {**seen, "state": [sorted(state) for state in seen["state"]]}


def check_two_ranks(tmp: str) -> dict[str, Any]:
    theirs = fit(OnCPU(), seeded(ByName), ranks=2, save=f"{tmp}/fsdp1")
    whole = in_order(fit(ours(), seeded(ByName), ranks=2, save=f"{tmp}/ours"))
    assert_equal(theirs["losses"], whole["losses"], "FSDP1 trains as FSDP2")
    assert_equal(in_order(fit(ours(), seeded(ByName), ranks=2, resume=f"{tmp}/fsdp1")), whole, "FSDP1 -> ours")
    resumed = fit(OnCPU(), seeded(ByName), ranks=2, resume=f"{tmp}/ours")
    assert_equal(resumed["losses"], whole["losses"], "ours -> FSDP1")
    assert_equal(resumed["weights"], theirs["weights"], "ours -> FSDP1")
    assert_equal(in_order(resumed)["state"], in_order(theirs)["state"], "ours -> FSDP1")
    fit(OnCPU("sharded"), seeded(ByName), ranks=2, save=f"{tmp}/fsdp1_sharded")
    resumed = fit(ours("sharded"), seeded(ByName), ranks=2, resume=f"{tmp}/fsdp1_sharded")
    assert_equal(in_order(resumed), whole, "FSDP1, sharded -> ours")
    return whole


@pytest.mark.filterwarnings("ignore")
def test_interchange_with_fsdp1(tmp_path: Path) -> None:
    whole = run_distributed(check_two_ranks, str(tmp_path))[0]
    assert_equal(in_order(fit(single(), seeded(ByName), resume=tmp_path / "fsdp1")), whole, "FSDP1 -> one device")
    files = [read(tmp_path / name) for name in ("fsdp1", "ours")]
    for file in files:
        (state,) = file["optimizer_states"]
        state["state"] = dict(sorted(state["state"].items()))
    assert_equal(*files)
