from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from helpers import Net, assert_equal, loader, run_distributed
from lightning_bwdopt import OptimInBwdMixin
from lightning_bwdopt.cli import main


class CliLit(LightningModule):
    """Has no `configure_optimizers`: the CLI's own `optimizer:` section makes one."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.net = Net(depth)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return loader(4)


class HandCliLit(CliLit):
    """Shards and compiles itself, when its optimizer exists already."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        self.net.blocks[1] = torch.compile(self.net.blocks[1], backend="eager")
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class MixedCliLit(OptimInBwdMixin, CliLit):
    """The same on the manual path."""


class CallableLit(CliLit):
    """Is given its optimizer as a callable."""

    def __init__(self, optimizer: OptimizerCallable = torch.optim.AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])  # LightningCLI warns when it is given both


BASE = [
    "--seed_everything=3",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=6",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
OPTIMIZER = ["--optimizer=AdamW", "--optimizer.lr=0.01", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"]
CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
FSDP = "lightning_bwdopt.FSDPOptimInBwdStrategy"
SINGLE = "lightning_bwdopt.SingleDeviceOptimInBwdStrategy"


def fit(model: type[LightningModule], *arguments: str, **kwargs: Any) -> LightningCLI:
    kwargs.setdefault("save_config_callback", None)
    return LightningCLI(model, args=["fit", *BASE, "--trainer.devices=1", *arguments], **kwargs)


def result(cli: LightningCLI) -> tuple[Any, ...]:
    optimizer = cli.trainer.optimizers[0]
    return cli.model.losses, dict(cli.model.named_parameters()), optimizer.state_dict(), cli.trainer.global_step


@pytest.mark.parametrize("model", [CliLit, MixedCliLit])
def test_top_level_optimizer_section_trains_as_in_the_ordinary_run(model: type[LightningModule]) -> None:
    ordinary = fit(CliLit, *OPTIMIZER)
    run = fit(model, *OPTIMIZER, "--trainer.strategy=single_device_optim_in_bwd")
    assert run.trainer.strategy.optimizers_in_backward
    assert_equal(result(run), result(ordinary))


def test_optimizer_callable_in_init_args_and_subclass_mode() -> None:
    callable_optimizer = ["--model.optimizer=SGD", "--model.optimizer.lr=0.1"]
    ordinary = fit(CallableLit, *callable_optimizer)
    run = fit(CallableLit, *callable_optimizer, "--trainer.strategy=single_device_optim_in_bwd")
    assert_equal(result(run), result(ordinary))
    subclass = [
        "--model=test_cli.CallableLit",
        "--model.optimizer=SGD",
        "--model.optimizer.lr=0.1",
        "--trainer.strategy=SingleDeviceOptimInBwdStrategy",
        "--trainer.strategy.granularity=parameter",
    ]
    run = LightningCLI(
        LightningModule,
        subclass_mode_model=True,
        args=["fit", *BASE, "--trainer.devices=1", *subclass],
        save_config_callback=None,
    )
    assert run.trainer.strategy.granularity == "parameter"
    assert_equal(result(run), result(ordinary))


def test_config_round_trip_and_saved_config(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    written = tmp_path / "config.yaml"
    arguments = [f"--trainer.strategy={FSDP}", "--trainer.strategy.gradient_clipping=exact", *OPTIMIZER]
    with pytest.raises(SystemExit):
        fit(CliLit, *arguments, "--print_config")
    written.write_text(capsys.readouterr().out)
    strategy = yaml.safe_load(written.read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == FSDP
    assert strategy["init_args"]["gradient_clipping"] == "exact"
    with pytest.raises(SystemExit):
        LightningCLI(CliLit, args=["fit", f"--config={written}", "--print_config"], save_config_callback=None)
    assert capsys.readouterr().out == written.read_text()

    from lightning.pytorch.cli import SaveConfigCallback

    strategy_options = [f"--trainer.strategy={SINGLE}", "--trainer.strategy.granularity=parameter"]
    options = [*OPTIMIZER, *strategy_options, f"--trainer.default_root_dir={tmp_path / 'run'}"]
    run = fit(CliLit, *options, save_config_callback=SaveConfigCallback)
    saved = tmp_path / "run" / "config.yaml"
    again = LightningCLI(CliLit, args=["fit", f"--config={saved}"], save_config_callback=None)
    assert_equal(result(again), result(run))


def _contains(whole: Any, part: Any, at: str = "") -> None:
    if isinstance(part, dict):
        for key, value in part.items():
            assert key in whole, f"{at}.{key} is missing"
            _contains(whole[key], value, f"{at}.{key}")
    elif isinstance(part, list):
        assert len(whole) == len(part), at
        for index, value in enumerate(part):
            _contains(whole[index], value, f"{at}[{index}]")
    else:
        assert whole == part, f"{at}: {whole!r} instead of {part!r}"


@pytest.mark.parametrize("shipped", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_survive_a_round_trip(shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from examples.full_finetune import main as finetune

    printed = []
    for config in (shipped, tmp_path / "again.yaml"):
        with pytest.raises(SystemExit):
            finetune(["fit", f"--config={config}", "--print_config"])
        printed.append(capsys.readouterr().out)
        (tmp_path / "again.yaml").write_text(printed[-1])
    assert printed[1] == printed[0]
    _contains(yaml.safe_load(printed[0]), yaml.safe_load(shipped.read_text()))


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        (f"--trainer.strategy={FSDP} --trainer.strategy.gradient_cliping=exact", "gradient_cliping"),
        (f"--trainer.strategy={FSDP} --trainer.strategy.sharding_strategy=FULL", "sharding_strategy"),
        ("--trainer.strategy=fsdp_optim_in_bw", "fsdp_optim_in_bw"),
        (f"--trainer.strategy={SINGLE} --trainer.strategy.granularity=units", "granularity"),
        (f"--trainer.strategy={SINGLE} --trainer.strategy.granularty=unit", "granularty"),
    ],
)
def test_typing_errors_are_named(argument: str, named: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises((SystemExit, ValueError, TypeError)) as error:
        fit(CliLit, *OPTIMIZER, *argument.split())
    assert named in str(error.value) + capsys.readouterr().err


def test_console_script_fits(tmp_path: Path) -> None:
    model = ["--model=test_cli.CallableLit", "--model.optimizer=SGD", "--model.optimizer.lr=0.1"]
    strategy = ["--trainer.strategy=single_device_optim_in_bwd", f"--trainer.default_root_dir={tmp_path}"]
    main(["fit", *BASE, "--trainer.devices=1", *strategy, *model])
    assert (tmp_path / "config.yaml").exists()


def _two_ranks() -> list[Any]:
    """A top-level optimizer is built before `fully_shard` replaces its parameters, in the strategy or by hand."""
    results = []
    sys.argv = ["program"]
    for model, enabled in ((CliLit, False), (CliLit, True), (MixedCliLit, True), (HandCliLit, True)):
        options = [f"--trainer.strategy={FSDP}", f"--trainer.strategy.enabled={str(enabled).lower()}"]
        args = ["fit", *BASE, "--trainer.devices=2", *OPTIMIZER, *options]
        cli = LightningCLI(model, args=args, save_config_callback=None)
        before = dict(type(cli.model)().named_parameters())
        weights = {name: p.full_tensor() for name, p in cli.model.named_parameters()}
        weights = {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}
        assert before.keys() == weights.keys()
        state = [
            {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in entry.items()}
            for entry in cli.trainer.optimizers[0].state.values()
        ]
        assert len(state) == len(weights)
        results.append((cli.model.losses, weights, state, cli.trainer.global_step))
    for other in results[1:]:
        assert_equal(other, results[0])
    return [loss.item() for loss in results[0][0]]


def test_top_level_optimizer_section_on_two_ranks() -> None:
    losses = run_distributed(_two_ranks)[0]
    assert losses[4] != losses[0]  # the second epoch sees other weights
