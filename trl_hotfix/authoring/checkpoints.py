"""Tensors that a callback keeps beside a checkpoint, and finds again when the run is resumed from it.

transformers does not tell a callback where it writes a checkpoint, nor from which one a run resumes. So we take the
folders that transformers gives checkpoints, and use what lies there only if it was written with the run's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("trl_hotfix")

_SAMPLE = 64
"""How many values of each parameter we compare to recognise the weights."""


def keep_beside_checkpoint(args: Any, state: Any, name: str, model: Any, tensors: Mapping[str, Any]) -> None:
    """Write ``tensors`` into the checkpoint of this step, as ``name``. ``model`` is the one that is trained.

    Only the ranks that save checkpoints write. What cannot be written is a warning: the run goes on.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = _folder(args, state)
    if not args.should_save or not folder.is_dir():
        return
    contents = {**{f"weights.{key}": value for key, value in _sample(model).items()}, **tensors}
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in contents.items()}, folder / name)
    except (OSError, SafetensorError) as error:
        _log.warning(
            "%s cannot be written, and a run that resumes from there begins it again: %s", folder / name, error
        )


def kept_beside_checkpoint(args: Any, state: Any, name: str, model: Any) -> dict[str, Any] | None:
    """Return what was kept as ``name`` in the checkpoint that this run is resumed from, or None.

    It is looked for where ``args`` say that the run is resumed from, and among the checkpoints of the output folder.
    ``model`` is the one that is trained, with the weights of the checkpoint.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    resumed_from = getattr(args, "resume_from_checkpoint", None)
    folders = [Path(resumed_from)] if isinstance(resumed_from, str) else []
    expected = {f"weights.{key}": value.cpu() for key, value in _sample(model).items()}
    for folder in (*folders, _folder(args, state)):
        try:
            contents: dict[str, Any] = load_file(folder / name)
        except (OSError, SafetensorError):
            continue
        weights = {key: contents.pop(key) for key in list(contents) if key.startswith("weights.")}
        if weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in expected):
            return contents
    return None


def is_sharded(model: Any) -> bool:
    """Return whether a rank has only a part of the parameters of ``model`` (ZeRO-3, FSDP, tensor parallelism)."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    # ZeRO-3 gives each parameter its id, and a distributed tensor has placements.
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in model.parameters())


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _sample(model: Any) -> dict[str, Any]:
    """Return some values of each parameter, as they are: sums would depend on the device."""
    samples = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        samples[name] = values[:: max(1, len(values) // _SAMPLE)].clone()
    return samples
