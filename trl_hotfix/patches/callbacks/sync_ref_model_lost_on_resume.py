"""With ``sync_ref_model`` the reference model moves, and no checkpoint has it.

``SyncRefModelCallback`` changes the reference model in place. A resumed run makes it again, from ``ref_model`` or from
the path of the policy: the reference of the first step.

transformers tells callbacks when training begins and when it has saved, by ``on_train_begin`` and ``on_save``. TRL's
class has neither, and those that it inherits are not TRL's. So its constructor gives both to the callback itself, which
transformers asks for them. With ``ref_model_mixup_alpha=1`` the reference after a step that synchronizes is the policy,
and TRL's own step makes it, also from a checkpoint without a reference.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    Call,
    Once,
    absent,
    is_sharded,
    judge,
    keep_beside_checkpoint,
    kept_beside_checkpoint,
    shadowed,
    wrapper,
)
from ...model import Outcome
from ...testing import recorded_warnings

_FILE = "trl_hotfix_reference.safetensors"

_log = logging.getLogger("trl_hotfix")
_is_first_sharded_save = Once()


@wrapper
def keep_the_reference_with_checkpoints(call: Call) -> None:
    """Have the callback write the reference model into each checkpoint, and read it from the one that is resumed."""
    call()
    callback = call.trainer
    callback.on_train_begin = partial(_begin, callback, call.act_later())
    callback.on_save = partial(_save, callback)


def _begin(callback: Any, act: Callable[[], None], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Restore the reference if the run is resumed after it has moved, and call the method of the callback's class."""
    # The callback of the teachers of trl.experimental, a subclass, has other names for these arguments.
    has_moved = state.global_step >= getattr(args, "ref_model_sync_steps", 1)
    if has_moved and callback.ref_model is not None and not _restored(callback, act, args, state, control, **kwargs):
        _log.warning(
            "sync-ref-model-lost-on-resume: no reference model is found that belongs to the checkpoint of step %s, so "
            "the run goes on with the initial one. If the checkpoint is not in output_dir, name it as "
            "resume_from_checkpoint in the training arguments.",
            state.global_step,
        )
    return type(callback).on_train_begin(callback, args, state, control, **kwargs)


def _restored(callback: Any, act: Callable[[], None], args: Any, state: Any, control: Any, **kwargs: Any) -> bool:
    """Return whether the reference of the checkpoint was found, or follows from the policy."""
    reference = _reference(callback)
    kept = kept_beside_checkpoint(args, state, _FILE, kwargs["model"])
    if kept is not None and _shapes(kept) == _shapes(reference):
        act()
        for name, parameter in reference.items():
            parameter.data.copy_(kept[name])
        return True
    is_policy = getattr(args, "ref_model_mixup_alpha", None) == 1 and state.global_step % args.ref_model_sync_steps == 0
    if is_policy:
        act()
        callback.on_step_end(args, state, control, **kwargs)
    return is_policy


def _save(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Keep the reference in the checkpoint that has been saved, and call the method of the callback's class."""
    if callback.ref_model is not None and not is_sharded(callback.ref_model):
        keep_beside_checkpoint(args, state, _FILE, kwargs["model"], _reference(callback))
    elif callback.ref_model is not None and _is_first_sharded_save(callback):
        _log.warning(
            "sync-ref-model-lost-on-resume: each rank has only a part of the reference model, which is not kept with "
            "the checkpoints. A run that is resumed from them goes on with the initial one."
        )
    return type(callback).on_save(callback, args, state, control, **kwargs)


def _reference(callback: Any) -> dict[str, Any]:
    return {f"reference.{name}": parameter for name, parameter in callback.ref_model.named_parameters()}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def reference_goes_on_in_a_resumed_run(module: ModuleType) -> Outcome:
    """Read the reference's weight in a run that is resumed from step 1: half-way to the policy, and 1 if it is lost."""
    if "sync_target_model" not in vars(getattr(module, "SyncRefModelCallback", object)):
        return absent("this module has no SyncRefModelCallback of its own")
    import torch

    policy, moved, initial = (
        torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([weight], device="cpu"))]) for weight in (3.0, 1.0, 1.0)
    )
    whole, resumed = (module.SyncRefModelCallback(ref_model=model, accelerator=None) for model in (moved, initial))
    step = SimpleNamespace(global_step=1)
    with tempfile.TemporaryDirectory() as folder, recorded_warnings():
        args = SimpleNamespace(output_dir=folder, should_save=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
        with shadowed(module, "AcceleratorState", lambda: SimpleNamespace(deepspeed_plugin=None)):
            whole.on_step_end(args, step, None, model=policy)
        Path(folder, "checkpoint-1").mkdir()
        whole.on_save(args, step, None, model=policy)
        resumed.on_train_begin(args, step, None, model=policy)
    return judge(float(initial[0]), right=2.0, wrong=1.0)
