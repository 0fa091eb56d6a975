"""The FSDP2 strategy: shards the LightningModule, and runs its steps through the sharded root."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from typing_extensions import override

from lightning_bwdopt import arguments, checks, loading, sharding
from lightning_bwdopt.arguments import GradientClipping, Granularity, NonFinite, ShardingStrategy, StateDictType
from lightning_bwdopt.mode import InBackwardStrategy, log_units
from lightning_bwdopt.policies import WrapPolicy, check_policy
from lightning_bwdopt.remapping import remap_optimizers, remember_names
from lightning_bwdopt.sharded_checkpoints import ShardedCheckpoints
from lightning_bwdopt.units import named_units

if TYPE_CHECKING:
    from lightning.fabric.strategies import _StrategyRegistry
    from lightning.pytorch import LightningModule, Trainer


class FSDPOptimInBwdStrategy(InBackwardStrategy, ShardedCheckpoints):
    """Trains with FSDP2 and the optimizer inside the backward pass: ``Trainer(strategy="fsdp_optim_in_bwd")``.

    An unmodified LightningModule is sharded block by block. Each block's parameters are stepped, and their gradients
    dropped, as soon as they are reduced; results are those of ``enabled=False``, the ordinary FSDP2 run.

    Args:
        enabled: The mode. ``False`` is ordinary FSDP2 with the same sharding, to compare with.
        auto_wrap_policy: Which modules are sharded by themselves: a set of classes, a callable that is given a
            module, or a policy of ``torch.distributed.fsdp.wrap``. ``None``: the repeated blocks, found. Ignored where
            ``configure_model`` applied ``fully_shard``.
        activation_checkpointing_policy: Whose activations are recomputed in backward; as ``auto_wrap_policy``, but
            ``None``: nobody's.
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` (parameters stay gathered between forward and
            backward) or ``"HYBRID_SHARD"`` (sharded inside groups of ranks, replicated across them).
        device_mesh: ``(replicate, shard)`` sizes for ``"HYBRID_SHARD"``.
        cpu_offload: Keep parameters, gradients and optimizer state on the host, and step there. ``True``: in pinned
            memory; a ``torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)`` saves that.
        mp_policy: A ``torch.distributed.fsdp.MixedPrecisionPolicy``, or a dict of its fields with dtypes by name.
            ``None`` follows ``Trainer(precision=…)``.
        state_dict_type: ``"full"``: checkpoints are one file, written by rank 0; ``"sharded"``: a folder, written by
            all ranks.
        data_parallel_size: Ranks that share the data; ``"auto"``: all that are not tensor-parallel.
        tensor_parallel_size: Ranks that share a layer, for ``parallelize_module`` in ``configure_model``.
        granularity: ``"unit"``: one step per FSDP unit; ``"parameter"``: one per parameter. Equal results.
        gradient_clipping: What to do about ``Trainer(gradient_clip_val=…)``: ``"disable"`` it with a warning,
            ``"error"``, or clip ``"exact"``ly, for which clipping by norm runs backward twice.
        on_nonfinite: On a loss that is NaN or infinite on any rank: ``"ignore"``, ``"error"``, or ``"skip"`` the step.
        self_check: Probe an optimizer class that is not known, and refuse it where its result would change.
        process_group_backend: As in Lightning's ``ModelParallelStrategy``.
        timeout: As in Lightning's ``ModelParallelStrategy``.
        **unsupported: Nothing; names that ``FSDPStrategy`` takes are answered with their replacement.

    Raises:
        TypeError: an unknown argument, or a value of a wrong type.
        ValueError: an option out of its choices.

    Example::

        trainer = Trainer(strategy=FSDPOptimInBwdStrategy(state_dict_type="sharded"), devices=2)
    """

    strategy_name = "fsdp_optim_in_bwd"

    def __init__(
        self,
        *,
        enabled: bool = True,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing_policy: WrapPolicy | None = None,
        sharding_strategy: ShardingStrategy = "FULL_SHARD",
        device_mesh: tuple[int, int] | None = None,
        cpu_offload: bool | CPUOffloadPolicy = False,
        mp_policy: MixedPrecisionPolicy | dict[str, Any] | None = None,
        state_dict_type: StateDictType = "full",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        granularity: Granularity = "unit",
        gradient_clipping: GradientClipping = "disable",
        on_nonfinite: NonFinite = "ignore",
        self_check: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            known = list(inspect.signature(type(self)).parameters)[:-1]
            arguments.check_names(unsupported, known, arguments.FSDP1_ARGUMENTS)
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        arguments.check_offload_policy(cpu_offload)
        arguments.check_timeout(timeout)
        arguments.check_sharding_strategy(sharding_strategy)
        arguments.check_choice("state_dict_type", state_dict_type, StateDictType)
        if data_parallel_size != "auto":
            arguments.check_size("data_parallel_size", data_parallel_size)
        arguments.check_size("tensor_parallel_size", tensor_parallel_size)
        arguments.check_hybrid_mesh(sharding_strategy, device_mesh)
        arguments.check_hybrid_tensor_parallel(sharding_strategy, tensor_parallel_size)
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._init_mode(enabled, granularity, gradient_clipping, on_nonfinite, self_check)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.sharding_strategy = sharding_strategy
        self.cpu_offload = cpu_offload
        self.mp_policy = arguments.mixed_precision_policy(mp_policy)
        self._hybrid_sizes = device_mesh

    # Processes and mesh ---------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        world_size, tensor_parallel = self.num_nodes * self.num_processes, self._tensor_parallel_size
        assert isinstance(tensor_parallel, int)
        if self._data_parallel_size == "auto":
            self._data_parallel_size = world_size // max(tensor_parallel, 1) or 1
        arguments.check_parallel_sizes(self._data_parallel_size, tensor_parallel, world_size)
        super().setup_environment()

    @override
    def _setup_distributed(self) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if attempt != "0" and not dist.is_initialized():
            # A restarted job (`torchrun --max-restarts`) finds the agent's store with the addresses of the processes
            # that died (torch 2.13), and waits for those. Lightning keeps a process group that exists.
            store, rank, world_size = next(dist.rendezvous("env://", timeout=self._timeout))
            store = dist.PrefixStore(f"attempt_{attempt}", store)
            dist.init_process_group(
                self._get_process_group_backend(),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=self._timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        super()._setup_distributed()

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        # Offloaded shards are reduced and gathered on the host, for the gradient norm and for full checkpoints.
        return "cpu:gloo,cuda:nccl" if self.cpu_offload and backend == "nccl" else backend

    def _sharding_mesh(self) -> DeviceMesh:
        if self.sharding_strategy != "HYBRID_SHARD":
            return self.device_mesh["data_parallel"]
        if self._hybrid_sizes is None:
            arguments.check_hybrid_nodes(self.num_nodes, self.num_processes)
        sizes = self._hybrid_sizes or (self.num_nodes, self.num_processes)
        arguments.check_hybrid_mesh(self.sharding_strategy, sizes, self.world_size)
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replicate", "shard"))

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._attached():
            checks.check_last_backward(self._sharded)

    # Setting up -----------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._names_before_sharding = remember_names(model)  # `configure_model` may shard it

    @override
    def setup(self, trainer: Trainer) -> None:
        # Lightning's own `setup`, except that the model need not be sharded by `configure_model`.
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        checks.check_wrapped(module)
        checks.check_double_precision(self.precision_plugin)
        checks.check_sync_batchnorm(self._layer_sync)
        checks.check_weight_averaging(trainer)
        if self.enabled:
            checks.check_grad_scaler(self.precision_plugin)
            if self.cpu_offload:
                checks.check_offload(self.root_device, torch.__version__)

        self._names_before_sharding.update(remember_names(module))  # and what hooks have built
        self.shard()
        self._sharded = [m for m in module.modules() if isinstance(m, sharding.FSDPModule)]
        checks.check_on_meta(loading.initialize(module))
        self.model_to_device()
        self.barrier()

        if trainer.state.fn == TrainerFn.FITTING:
            if self.enabled:
                log_units(named_units(module))
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.cpu_offload:
            self.model.to(self.root_device)
            return
        for buffer in self.model.buffers():  # `fully_shard` keeps the parameters on the host
            buffer.data = buffer.data.to(self.root_device)

    def shard(self) -> None:
        """Shards the LightningModule as the strategy does after ``configure_model``, for calling it in that hook.

        Needed only where weights are loaded into a model built on the meta device
        (:func:`lightning_bwdopt.load_pretrained`). Does nothing where ``fully_shard`` has been applied.
        """
        module = self.lightning_module
        assert module is not None
        self.model = self.precision_plugin.convert_module(module)
        if sharding.is_sharded(module):
            return
        if self.activation_checkpointing_policy:
            sharding.checkpoint_activations(module, self.activation_checkpointing_policy)
        options: dict[str, Any] = {
            "mesh": self._sharding_mesh(),
            "reshard_after_forward": self.sharding_strategy != "SHARD_GRAD_OP",
            "mp_policy": self._mixed_precision(),
            "offload_policy": self._offload_policy(),
        }
        blocks = sharding.find_blocks(module, self.auto_wrap_policy)
        if self._is_user_manual():
            # Its backward runs inside `training_step`; a root around it would not have reduced its gradients yet.
            checks.check_root_parameters(module)
            for child in sharding.called_children(module):
                inside = set(child.modules()) - {child}
                sharding.shard(child, [block for block in blocks if block in inside], root_reshards=True, **options)
        else:
            sharding.shard(module, blocks, root_steps=True, **options)
        if self.sharding_strategy == "HYBRID_SHARD" and self.enabled and module.trainer.state.fn == TrainerFn.FITTING:
            self._warn(
                "hybrid",
                "`sharding_strategy='HYBRID_SHARD'`: FSDP2 keeps every unit's all-reduce buffer until backward ends, so"
                " stepping in backward gives the ordinary result and saves no memory.",
            )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.cpu_offload:
            return OffloadPolicy()
        pin = self.root_device.type != "cpu"  # pinning needs an accelerator
        return CPUOffloadPolicy(pin and (self.cpu_offload is True or self.cpu_offload.pin_memory))

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        if self.mp_policy is not None:
            return self.mp_policy
        if self.precision_plugin.precision == "bf16-mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    @override
    def _build_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super()._build_optimizers(trainer)
        assert self.lightning_module is not None
        remap_optimizers(self.optimizers, self.lightning_module, self._names_before_sharding)
        for optimizer in self._real_optimizers():  # with the mode off, too: nothing would train, silently
            checks.check_foreign_parameters(optimizer, self.lightning_module)

    # Steps go through the sharded root's forward, so that its own parameters are gathered ----------------------------

    def _through_root(self, context: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        assert self.lightning_module is not None
        with context:
            if isinstance(self.model, sharding.FSDPModule):
                return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)
            return getattr(self.lightning_module, name)(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._noticing_interruption():
            return self._through_root(self.precision_plugin.train_step_context(), "training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through_root(self.precision_plugin.val_step_context(), "validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through_root(self.precision_plugin.test_step_context(), "test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through_root(self.precision_plugin.predict_step_context(), "predict_step", *args, **kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        description = "FSDP2 with the optimizer in backward"
        strategy_registry.register(cls.strategy_name, cls, description=description)
        offload = f"{description}, parameters and optimizer state on the host"
        strategy_registry.register(f"{cls.strategy_name}_offload", cls, description=offload, cpu_offload=True)
