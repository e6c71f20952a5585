"""What shards the weights of a model over ranks, as far as a CPU runs it: DeepSpeed's ZeRO, and FSDP2 of torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .setting import CannotBeAskedError

FSDP = "fsdp"
ENGINES = ("zero 1", "zero 2", "zero 2 offloaded", "zero 3", FSDP)
"""Stages of ZeRO, and one that keeps the optimizer's state in the memory of the host."""


def arguments(engine: str, ranks: int) -> dict[str, Any]:
    """Return the fields of a config that ask for an engine. Raises ``CannotBeAskedError`` without DeepSpeed."""
    name, _, stage = engine.partition(" ")
    if name != "zero":
        return {}
    if find_spec("deepspeed") is None:
        raise CannotBeAskedError("DeepSpeed is not installed")
    # Without LOCAL_SIZE early releases ask numactl for the number of devices.
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks)}
    # It takes minutes to compile.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return {"deepspeed": deepspeed_config(int(stage[0]), offloads="offloaded" in stage)}


def deepspeed_config(stage: int, *, offloads: bool = False) -> dict[str, Any]:
    """Return the config of DeepSpeed for a stage of ZeRO with any optimizer, whose gradients nobody clips.

    ``offloads``: the memory of the host keeps the optimizer's state.
    """
    zero: dict[str, Any] = {"stage": stage}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        # 0.19.3 clips where it is left out.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def prepare(trainer: Any, engine: str) -> None:
    """Have a trainer train under an engine. Raises ``CannotBeAskedError`` where it has wrapped its model already."""
    import torch

    if engine != FSDP and not trainer.is_deepspeed_enabled:
        raise RuntimeError("accelerate has not asked for DeepSpeed")

    def create_optimizer(*_: Any, **__: Any) -> Any:
        # One group: transformers' second is empty for a model without biases, and DeepSpeed drops it.
        if trainer.optimizer is None:
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=trainer.args.learning_rate)
        return trainer.optimizer

    trainer.create_optimizer = create_optimizer
    if engine == FSDP:
        if isinstance(trainer.model, torch.nn.parallel.DistributedDataParallel):
            raise CannotBeAskedError(f"{type(trainer).__name__} wraps its model when it is made")
        _shard(trainer.model)
        # accelerate knows no FSDP on a CPU, and would put DDP around the shards.
        trainer.accelerator.prepare_model = lambda model, *_, **__: model


def _shard(model: Any) -> None:
    """Shard each layer and the model over all ranks."""
    import torch
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    for module in (*layers, model):
        # Gloo cannot average.
        fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)


def whole(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Give a copy of each weight with the shards of all ranks, which must all call this."""
    for name, weight in weights:
        if hasattr(weight, "ds_id"):
            with import_module("deepspeed").zero.GatheredParameters([weight]):
                yield name, weight.detach().clone()
        else:
            yield name, unsharded(weight.detach()).clone()


def unsharded(tensor: Any) -> Any:
    """Return a tensor of FSDP whole, and any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
