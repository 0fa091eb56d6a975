"""The estimate against real FSDP2 on real processes, the published case, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from helpers import run_distributed, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy, estimate, memory, plots, sizes
from lightning_bwdopt.measured_step import MeasuredStep
from lightning_bwdopt.memory import MIB, MemoryTracker
from lightning_bwdopt.simulation import simulate

ROOT = Path(__file__).parent.parent


class Data(LightningDataModule):
    """Regression rows, as in `helpers.loader`."""

    def __init__(self, batch_size: int = 4, width: int = 6) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.width = width

    def train_dataloader(self) -> DataLoader:
        x = torch.zeros(16 * self.batch_size, self.width)
        return DataLoader(TensorDataset(x, x[:, :1]), batch_size=self.batch_size)


class Wide(LightningModule):
    """Blocks whose weights outweigh everything else; fused AdamW."""

    def __init__(self, depth: int = 6, width: int = 128, frozen: int = 0, fused: bool | None = True) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.blocks[:frozen].requires_grad_(False)
        self.fused = fused

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = x.square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), fused=self.fused)


class Layer(nn.Module):
    """Keeps several activations of its input's size for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(torch.tanh(self.linear(x))))


class Deep(Wide):
    def __init__(self) -> None:
        super().__init__(width=32)
        self.blocks = nn.ModuleList(Layer(32) for _ in range(6))


class Halved(Wide):
    """Each block lies on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)) for _ in range(4)
        )

    def configure_model(self) -> None:
        for block in self.blocks:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )


class ReadsInStep(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 0:
            loss = loss * 1.0
        return loss


class ReadsInInit(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class FailsInInit(Wide):
    def __init__(self) -> None:
        super().__init__()
        raise LookupError("no such file")


def config(folder: Path, model: str | dict = "Wide", strategy: Any = None, **trainer_options: Any) -> list[str]:
    """Writes a config; the arguments of `fit` that name it."""
    content = {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "max_steps": 20, **trainer_options},
        "model": {"class_path": f"test_memory.{model}"} if isinstance(model, str) else model,
        "data": {"class_path": "test_memory.Data"},
    }
    if strategy is not None:
        content["trainer"]["strategy"] = strategy
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "config.yaml")]


def wide(**init_args: Any) -> dict[str, Any]:
    return {"class_path": "test_memory.Wide", "init_args": init_args}


def fsdp(**init_args: Any) -> dict[str, Any]:
    return {"class_path": "lightning_bwdopt.FSDPOptimInBwdStrategy", "init_args": init_args}


# The tracker itself ---------------------------------------------------------------------------------------------------


def test_tracker_counts_what_lives_by_what_it_is_for() -> None:
    tracker = MemoryTracker()
    weight = torch.ones(256, requires_grad=True)
    tracker.watch(weight, "parameters")
    with tracker:
        product = weight * 2.0
        view = product[:10]
        assert tracker.current["activations"] == 1024
        assert tracker.total == 2048
        with torch.no_grad():
            temporary = torch.zeros(4, dtype=torch.int64)
        assert tracker.current["temporaries"] == 32
        del temporary
        assert tracker.total == 2048
        del product
        assert tracker.total == 2048  # the view keeps the storage
        del view
        assert tracker.total == 1024
    assert tracker.peaks["forward"].bytes == 2048 + 32


def test_tracker_moves_a_storage_between_categories() -> None:
    tracker = MemoryTracker()
    with tracker:
        weight = torch.ones(8)
    tracker.watch(weight, "gradients")
    assert tracker.current["gradients"] == tracker.total == 32
    tracker.restart()
    with tracker:
        weight + weight
    assert tracker.peaks["forward"].categories["gradients"] == 32
    assert tracker.peaks["forward"].bytes == 64


def test_level_peaks_are_the_last_of_them() -> None:
    peaks = {"forward": memory.Peak(1000, {}), "backward": memory.Peak(995, {}), "optimizer step": memory.Peak(900, {})}
    assert memory.highest(peaks) == "backward"
    assert memory.highest({**peaks, "forward": memory.Peak(1100, {})}) == "forward"


def test_fake_parameters_stay_shared_and_copy() -> None:
    import copy

    mode = memory.fake_mode()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    memory.drop_data(net, mode)
    assert net[0].weight is net[1].weight
    with memory.fake_tensors(mode):
        copied = copy.deepcopy(net)
    assert isinstance(copied[0].weight, nn.Parameter)
    assert copied[0].weight is copied[1].weight is not net[0].weight
    memory.convert_parameters(net, lambda tensor: tensor.bfloat16())
    assert net[0].weight is net[1].weight
    assert net[0].weight.dtype == torch.bfloat16


# Against reality ------------------------------------------------------------------------------------------------------


def _measure(enabled: bool, model: str, options: dict[str, Any], ranks: int, run_options: dict[str, Any]) -> Any:
    """The facts of a run, and for each phase the lowest peak of a few: gloo's threads hold tensors a little longer."""
    peaks: dict[str, list[memory.Peak]] = {}
    for _ in range(4):
        measured = MeasuredStep()
        torch.manual_seed(1)
        strategy = FSDPOptimInBwdStrategy(enabled=enabled, **options)
        run = trainer(strategy=strategy, devices=ranks, callbacks=[measured], **run_options)
        run.fit(globals()[model](), datamodule=Data())
        for phase, peak in measured.result().peaks.items():
            peaks.setdefault(phase, []).append(peak)
    return measured.result(), {phase: min(of, key=lambda peak: peak.bytes) for phase, of in peaks.items()}


def check_against_real_ranks(
    folder: Path,
    enabled: bool,
    model: str,
    options: dict[str, Any],
    ranks: int = 2,
    **run_options: Any,
) -> None:
    real, peaks = run_distributed(_measure, enabled, model, options, ranks, run_options, world_size=ranks)[0]
    args = config(folder, model, fsdp(**options), devices=ranks, **run_options)
    simulated = simulate(args, enabled=enabled)
    assert simulated.layer_gradient == real.layer_gradient
    # What is logged is a few numbers; of a unit that is reduced, gloo lets go when it comes to it.
    late = {"forward": 0, "backward": 2 * real.layer_gradient, "optimizer step": 0}
    for phase, peak in peaks.items():
        assert -256 < peak.bytes - simulated.peaks[phase].bytes < 256 + late[phase], phase
        for category in ("parameters", "optimizer_state"):  # of the others, moments of equal height differ
            assert simulated.peaks[phase].categories[category] == peak.categories[category], category


@pytest.mark.parametrize(
    ("options", "run_options"),
    [
        ({}, {}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"precision": "bf16-true"}),
        (
            {"mp_policy": {"param_dtype": "bfloat16"}, "granularity": "parameter", "on_nonfinite": "skip"},
            {"accumulate_grad_batches": 2},
        ),
        ({"gradient_clipping": "exact"}, {"gradient_clip_val": 0.1}),
    ],
    ids=["plain", "shard_grad_op", "mixed", "clipped"],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_estimate_is_what_two_real_ranks_hold(
    tmp_path: Path, enabled: bool, options: dict[str, Any], run_options: dict[str, Any]
) -> None:
    check_against_real_ranks(tmp_path, enabled, "Wide", options, **run_options)


def test_estimate_is_what_tensor_parallel_ranks_hold(tmp_path: Path) -> None:
    check_against_real_ranks(tmp_path, True, "Halved", {"tensor_parallel_size": 2}, ranks=4)


@pytest.mark.parametrize("enabled", [False, True])
def test_estimate_is_what_one_real_device_holds(tmp_path: Path, enabled: bool) -> None:
    measured = MeasuredStep()
    run = trainer(strategy=SingleDeviceOptimInBwdStrategy(enabled=enabled), callbacks=[measured])
    run.fit(Wide(fused=None), datamodule=Data())
    simulated = simulate(config(tmp_path, wide(fused=None)), enabled=enabled, world_size=1)
    assert simulated.strategy == "SingleDeviceOptimInBwdStrategy"
    for phase, peak in measured.result().peaks.items():
        assert abs(simulated.peaks[phase].bytes - peak.bytes) < 256, phase


# Options that change memory -------------------------------------------------------------------------------------------


def test_each_option_has_its_effect(tmp_path: Path) -> None:
    def categories(**options: Any) -> dict[str, int]:
        return (
            simulate(config(tmp_path, strategy=fsdp(**options)), enabled=True, world_size=4)
            .peaks["backward"]
            .categories
        )

    plain = categories()
    assert categories(sharding_strategy="SHARD_GRAD_OP")["unsharded_parameters"] > 1.5 * plain["unsharded_parameters"]
    hybrid = categories(sharding_strategy="HYBRID_SHARD", device_mesh=[2, 2])
    assert hybrid["parameters"] == pytest.approx(2 * plain["parameters"], rel=0.05)
    by_class = categories(auto_wrap_policy=["torch.nn.Linear"])
    assert by_class["parameters"] == plain["parameters"]


def test_hybrid_shard_saves_nothing(tmp_path: Path) -> None:
    strategy = fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=[2, 2])
    result = estimate.estimate(config(tmp_path, wide(width=512), strategy=strategy), world_size=4)
    assert abs(result.saved) < 0.03 * result.ordinary.peak.bytes
    assert "will not help here" in result.advice()
    assert "\n7 units: 6 x Linear (0.3 M parameters each), Wide (3584).\n" in result.table()


def test_tensor_parallel_units(tmp_path: Path) -> None:
    args = config(tmp_path, {"class_path": "test_meshes.TensorParallel"}, fsdp(tensor_parallel_size=2))
    assert (
        simulate(args, enabled=True, world_size=4).units
        == "4 units: 3 x Block (198 parameters each), TensorParallel (81)"
    )


def test_activation_checkpointing_lowers_activations(tmp_path: Path) -> None:
    model = {"class_path": "test_memory.Deep"}
    kept = simulate(config(tmp_path, model, fsdp(), devices=2), enabled=True)
    strategy = fsdp(activation_checkpointing_policy=["test_memory.Layer"])
    recomputed = simulate(config(tmp_path, model, strategy, devices=2), enabled=True)
    assert recomputed.peaks["forward"].categories["activations"] < 0.5 * kept.peaks["forward"].categories["activations"]


def test_defaults_are_those_of_the_accelerator(tmp_path: Path) -> None:
    """On a GPU torch steps plain tensors all at once, with temporaries of their size."""
    args = config(tmp_path, wide(fused=None))
    on_cpu = simulate(args, enabled=False, world_size=1).peaks["optimizer step"].categories["temporaries"]
    on_gpu = simulate([*args, "--trainer.accelerator=gpu"], enabled=False, world_size=1)
    assert on_gpu.peaks["optimizer step"].categories["temporaries"] > 2 * on_cpu


def test_real_weights_give_the_same_figures(tmp_path: Path) -> None:
    args = config(tmp_path, precision="bf16-true", devices=2)
    without = simulate(args, enabled=True)
    assert simulate(args, enabled=True, real_weights=True) == without
    assert simulate(
        config(tmp_path, "ReadsInInit", precision="bf16-true"), enabled=True, world_size=2, real_weights=True
    )


def test_an_optimizer_section_of_the_config(tmp_path: Path) -> None:
    """It is built before Lightning converts the model."""
    args = config(tmp_path, precision="bf16-true")
    result = simulate([*args, "--optimizer=SGD", "--optimizer.lr=0.1"], enabled=True, world_size=1)
    assert result.peak.categories["optimizer_state"] == 0


# The command ----------------------------------------------------------------------------------------------------------


def test_command_prints_the_figures_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = config(tmp_path, wide(depth=8, width=256), fsdp())
    status = estimate.main([*args, "--world_size=2", f"--json={tmp_path / 'e.json'}", f"--plot={tmp_path / 'e.png'}"])
    assert status == 0
    figures = json.loads((tmp_path / "e.json").read_text())
    printed = capsys.readouterr().out
    for mode in ("ordinary", "in_backward"):
        assert list(figures[mode]["categories"]) == list(memory.CATEGORIES)
        assert sum(figures[mode]["categories"].values()) == pytest.approx(figures[mode]["peak_mib"])
        assert f"{figures[mode]['peak_mib']:.2f}" in printed
    assert figures["saved_mib"] == figures["ordinary"]["peak_mib"] - figures["in_backward"]["peak_mib"]
    assert figures["layer_gradient_mib"] == (256 * 256 + 256) * 4 / 2 / MIB
    assert figures["world_size"] == 2
    # Six to eight layers' gradients are there at the ordinary peak, and none or one in backward.
    assert figures["saved_mib"] == pytest.approx(
        7 * figures["layer_gradient_mib"], abs=2 * figures["layer_gradient_mib"]
    )
    assert f"saves {figures['saved_mib'] * 1024:.1f} KiB" in printed
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


def test_a_tiny_model_is_seen_in_smaller_units(tmp_path: Path) -> None:
    result = estimate.estimate(config(tmp_path, wide(depth=2, width=16), fsdp()), world_size=2)
    table = result.table()
    assert "a steady step; KiB\n" in table
    assert f"{'peak':<26}{result.ordinary.peak.bytes / 1024:>12.2f}" in table
    assert f"The gradients of one layer take {(16 * 16 + 16) * 4 / 2 / 1024:.1f} KiB" in table
    assert " 0.0 MiB" not in table


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0.0 KiB"), (1000, "1.0 KiB"), (-(2**20), "-1.0 MiB"), (5.43 * 2**30, "5.4 GiB")]
)
def test_sizes_in_words(size: float, words: str) -> None:
    assert sizes.in_words(size) == words


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--wold_size=3", "`--wold_size` is no argument of this command. Did you mean `--world_size`?"),
        (
            "--trainer.max_stps=3",
            "`--trainer.max_stps` is no argument of this command. Did you mean `--trainer.max_steps`?",
        ),
        ("--zzzz", "`--zzzz` is no argument of this command. `lightning-bwdopt fit --help` names those of `fit`."),
    ],
)
def test_an_argument_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        estimate.main([*config(tmp_path), argument])
    said = capsys.readouterr().err
    assert f"lightning-bwdopt estimate: error: {message}" in said
    assert said.startswith("usage: lightning-bwdopt estimate ")
    assert len(said.splitlines()) < 8


def test_fits_is_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*config(tmp_path, strategy=fsdp()), "--world_size=2"]
    assert estimate.main([*args, "--fits=1GiB"]) == 0
    assert "in backward: 871.4 KiB fits into 1.0 GiB." in capsys.readouterr().out
    assert estimate.main([*args, "--fits", "0.5MB"]) == 1
    assert "in backward: 871.4 KiB does not fit into 488.3 KiB." in capsys.readouterr().out


def test_batch_size_comes_from_flags(tmp_path: Path) -> None:
    args = config(tmp_path, strategy=fsdp(), devices=2)
    small = simulate(args, enabled=True).peaks["forward"].categories["activations"]
    large = simulate([*args, "--data.batch_size=16"], enabled=True).peaks["forward"].categories["activations"]
    assert large == pytest.approx(4 * small, rel=0.05)


def test_advice_says_why_nothing_is_saved(tmp_path: Path) -> None:
    frozen = estimate.estimate(config(tmp_path, wide(frozen=6), fsdp()), world_size=2)
    assert "gradients of frozen parameters are none: little to gain" in frozen.advice()
    args = [*config(tmp_path, strategy=fsdp()), "--data.batch_size=4096"]
    full = estimate.estimate(args, world_size=2)
    assert "will not help here: activations dominate the peak; use activation checkpointing" in full.advice()


def test_published_case(tmp_path: Path) -> None:
    """Llama-2-7B on two ranks: 30 layers' gradients of 193 MiB at the ordinary peak, none of them in backward."""
    command = [sys.executable, "-m", "lightning_bwdopt", "estimate", "--config", "examples/configs/llama2_7b.yaml"]
    out = tmp_path / "e.json"
    process = subprocess.Popen(
        [*command, "--world_size=2", f"--json={out}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    printed = process.stdout.read().decode()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, printed
    figures = json.loads(out.read_text())
    assert figures["layer_gradient_mib"] == pytest.approx(193.0, rel=0.001)
    assert figures["ordinary"]["peak_mib"] == pytest.approx(27484, rel=0.001)
    assert figures["ordinary"]["categories"]["gradients"] == pytest.approx(5790, rel=0.001)
    assert figures["in_backward"]["peak_mib"] == pytest.approx(21925, rel=0.001)
    # Lightning still holds the last step's gradients in forward.
    assert figures["ordinary"]["most_mib"] == pytest.approx(27620.6, rel=0.001)
    assert "The forward is level with it (within 1%): 27.0 GiB." in printed
    assert "saves 5.4 GiB" in printed
    assert usage.ru_maxrss < 2**20  # KiB


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ({"strategy": "fsdp_optim_in_bwd_offload"}, 2, "`cpu_offload=True` moves parameters"),
        ({"strategy": "ddp"}, 2, "`strategy: ddp` cannot step in backward"),
        ({}, 0, "`--world_size=0` is no number of ranks"),
        ({"num_nodes": 2}, 3, "`--world_size=3` cannot be spread over the config's `num_nodes: 2`"),
        ({"accelerator": "gpu", "devices": -1}, None, "`devices: -1` is as many as the machine that trains has"),
        (
            {"max_time": "00:00:00:01", "limit_train_batches": 1, "max_epochs": 1, "accumulate_grad_batches": 32},
            1,
            None,
        ),
        ({"limit_train_batches": 0}, 1, "ended after 0 optimizer steps"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, options: dict[str, Any], world_size: int | None, message: str | None
) -> None:
    args = config(tmp_path, **options)
    if message is None:
        assert simulate(args, enabled=True, world_size=world_size).most > 0
        return
    with pytest.raises(ValueError, match=message):
        simulate(args, enabled=True, world_size=world_size)


def test_configured_ranks_are_counted(tmp_path: Path) -> None:
    args = config(tmp_path, strategy=fsdp(), accelerator="gpu", num_nodes=2)
    for devices in ("2", "0,1", "[0, 1]"):
        assert simulate([*args, f"--trainer.devices={devices}"], enabled=True).world_size == 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("ReadsInInit", r"building the model: `aten._local_scalar_dense.default` at `self.rates = .*--real_weights"),
        ("FailsInInit", r"building the model: `LookupError: no such file` at `raise LookupError.*--real_weights"),
        (
            "ReadsInStep",
            r"a training step: `aten._local_scalar_dense.default` at `if loss.item\(\) > 0:` .*Leave `.item",
        ),
    ],
)
def test_operations_that_need_values_are_named(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        simulate(config(tmp_path, model), enabled=True, world_size=1)


def test_command_ends_with_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        estimate.main([*config(tmp_path, "ReadsInStep"), "--world_size=1"])
    assert "lightning-bwdopt estimate: The estimate fails at a training step" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        estimate.main(["--fits=24"])
    assert "`24` is no size. Write `24GiB` or `80GB`." in capsys.readouterr().err


def test_a_process_of_a_group_is_refused() -> None:
    assert "`gloo` process group" in run_distributed(_estimate_in_a_group)[0]


def _estimate_in_a_group() -> str:
    with pytest.raises(RuntimeError) as caught, memory.fake_process_group(2):
        pass
    return str(caught.value)


def test_missing_parts_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MISSING", ImportError("no fake_pg"))
    with pytest.raises(RuntimeError, match="simulated with torch `.*no fake_pg"):
        MemoryTracker()


def test_command_says_that_it_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        estimate.main(["--config=none.yaml", f"--plot={tmp_path / 'memory.png'}"])
    assert "lightning-bwdopt estimate: `--plot` draws with matplotlib, which is" in capsys.readouterr().err
