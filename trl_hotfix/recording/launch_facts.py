"""The facts of a launch, of the machine, and of where a training began, by the names of ``catalogue.facts``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from ..catalogue.conditions import UNSET, Argument
from ..matching.model_configs import known, unknown
from . import beginnings

_LAUNCH = "launch"


def distributed(trainer: Any) -> Argument:
    """Return how the processes share the work: deepspeed, fsdp or ddp; not set for one process on one device."""
    kind = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
    if kind in ("DEEPSPEED", "FSDP"):
        return known(kind.lower(), _LAUNCH)
    if kind.startswith("MULTI_"):
        return known("ddp", _LAUNCH)
    if kind != "NO":
        return unknown(f"the launch is {kind}")
    return unknown("torch.nn.DataParallel") if trainer.args.n_gpu > 1 else UNSET


def _processes(trainer: Any) -> Argument:
    if trainer.args.n_gpu > 1:
        return unknown(f"one process has {trainer.args.n_gpu} GPUs")
    return known(trainer.accelerator.num_processes, _LAUNCH)


def _zero(trainer: Any) -> Mapping[str, Any] | None:
    """Return DeepSpeed's settings of ZeRO, or None without DeepSpeed."""
    if distributed(trainer).value != "deepspeed":
        return None
    settings: Mapping[str, Any] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config.get(
        "zero_optimization", {}
    )
    return settings


def _zero_stage(trainer: Any) -> Argument:
    zero = _zero(trainer)
    return known(zero.get("stage", 0), _LAUNCH) if zero is not None else UNSET


def _optimizer_offloaded(trainer: Any) -> Argument:
    zero = _zero(trainer)
    if zero is None:
        return UNSET
    return known((zero.get("offload_optimizer") or {}).get("device", "none") != "none", _LAUNCH)


def _mixed_precision(trainer: Any) -> Argument:
    name = next((name for name in ("bf16", "fp16") if getattr(trainer.args, name) is True), None)
    return known(name, "config") if name is not None else UNSET


def _triton(trainer: Any) -> Argument:
    import torch

    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    has_gpu = any(device is not None and device.is_available() for device in devices)
    return known(has_gpu and importlib.util.find_spec("triton") is not None, "machine")


def _epochs_before(trainer: Any) -> Argument:
    beginning = beginnings.of(trainer)
    return known(int(beginning.epoch), "state") if beginning is not None else beginnings.NOT_SEEN


def _synchronized(trainer: Any) -> Argument:
    beginning = beginnings.of(trainer)
    if beginning is None:
        return beginnings.NOT_SEEN
    return known(beginning.step >= trainer.args.ref_model_sync_steps, "state")


FACTS: Mapping[str, Callable[[Any], Argument]] = {
    "distributed": distributed,
    "processes": _processes,
    "zero_stage": _zero_stage,
    "optimizer_offloaded": _optimizer_offloaded,
    "mixed_precision": _mixed_precision,
    "triton": _triton,
    "epochs_before": _epochs_before,
    "synchronized": _synchronized,
}
