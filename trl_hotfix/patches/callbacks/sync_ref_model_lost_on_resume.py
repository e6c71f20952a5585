"""With ``sync_ref_model`` the reference model moves, and no checkpoint has it.

``SyncRefModelCallback`` changes the reference model in place. A resumed run makes it anew, from ``ref_model`` or from
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
    Once,
    absent,
    act_of_this_call,
    is_sharded,
    judge,
    keep_beside_checkpoint,
    kept_beside_checkpoint,
    shadowed,
)
from ...model import Outcome, Verdict
from ...testing import recorded_warnings

_FILE = "trl_hotfix_reference.safetensors"

_log = logging.getLogger("trl_hotfix")
_is_first_sharded_save = Once()


def keep_the_reference_with_checkpoints(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Have the callback write the reference model into each checkpoint, and read it from the one that is resumed."""
    wrapped(*args, **kwargs)
    instance.on_train_begin = partial(_begin, instance, act_of_this_call())
    instance.on_save = partial(_save, instance)


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
    """Compare runs that are resumed with runs without a stop, in which nothing else differs."""
    if "sync_target_model" not in vars(getattr(module, "SyncRefModelCallback", object)):
        return absent("this module has no SyncRefModelCallback of its own")
    # The policy's weight is 1 + step / 10, and the reference begins with 1. It is synchronized after steps 2 and 4.
    in_step_4 = (1.1 + 1.4) / 2
    with tempfile.TemporaryDirectory() as folder:
        run = partial(_Run, module)
        here, other, unsaved, one = (f"{folder}/{name}" for name in ("here", "other", "unsaved", "one"))
        whole = run(here)
        resumed = run(here, begin=3)
        outcome = judge(resumed.reference, right=in_step_4, wrong=1.2)
        is_fixed = outcome.verdict is Verdict.FIXED
        at_once = run(here, begin=3, end=3)
        elsewhere = run(other, begin=3, resume_from_checkpoint=f"{here}/checkpoint-3")
        run(unsaved, should_save=False)
        run(one, alpha=1)
        # Without the patch, runs that are resumed have another reference: that of the first step, moved since then.
        for name, found, right, wrong in (
            ("whole", whole, in_step_4, in_step_4),
            ("again", run(here), in_step_4, in_step_4),
            ("resumed", resumed, in_step_4, 1.2),
            ("resumed, no step", at_once, 1.1, 1.0),
            ("resumed in another folder", elsewhere, in_step_4, 1.2),
            ("resumed, alpha is 1", run(one, begin=3, end=3, alpha=1), 1.2, 1.0),
            ("resumed, alpha is 1, no reference", run(unsaved, begin=4, end=4, alpha=1), 1.4, 1.0),
            ("resumed before it moved", run(unsaved, begin=1, end=1), 1.0, 1.0),
            ("a teacher", run(here, end=0, is_teacher=True), 1.0, 1.0),
            ("a teacher, resumed", run(here, begin=3, end=3, is_teacher=True), 1.1, 1.0),
        ):
            if found.warnings or abs(found.reference - (right if is_fixed else wrong)) > 1e-6:
                raise AssertionError(f"{name}: the reference is {found.reference}; {found.warnings}")
        if is_fixed and any((resumed_run.weights != whole.weights).any() for resumed_run in (resumed, elsewhere)):
            raise AssertionError(f"{resumed.weights}, {elsewhere.weights}, and without a stop {whole.weights}")
        for name, found, expected in (
            ("no reference", run(unsaved, begin=3), 1.2),
            ("no reference, in a step that synchronizes", run(unsaved, begin=2, end=2), 1.0),
            ("no reference, alpha is 1", run(unsaved, begin=3, end=3, alpha=1), 1.0),
            ("a teacher, no reference", run(unsaved, begin=1, end=1, is_teacher=True), 1.0),
            ("other weights", run(here, begin=3, end=3, scale=2.0), 1.0),
            ("another shape", run(here, begin=3, end=3, size=3), 1.0),
            ("sharded", run(f"{folder}/sharded", is_sharded=True), in_step_4),
            ("resumed, sharded", run(f"{folder}/sharded", begin=3, is_sharded=True), 1.2),
        ):
            if len(found.warnings) != is_fixed or abs(found.reference - expected) > 1e-6:
                raise AssertionError(f"{name}: the reference is {found.reference}, not {expected}; {found.warnings}")
        without = run(f"{folder}/without", has_reference=False), run(f"{folder}/without", begin=3, has_reference=False)
        if any(found.warnings for found in without) or list(Path(folder, "without").glob("*/*")):
            raise AssertionError("there is no reference model, and something is done about it")
    return outcome


class _Run:
    """The callback in a run that is resumed after the step ``begin``, and saves checkpoints after steps 1 and 3."""

    def __init__(
        self,
        module: ModuleType,
        folder: str,
        *,
        begin: int = 0,
        end: int = 5,
        alpha: float = 0.5,
        scale: float = 1.0,
        size: int = 2,
        is_sharded: bool = False,
        has_reference: bool = True,
        is_teacher: bool = False,
        **arguments: Any,
    ) -> None:
        import torch

        told: list[str] = []

        class Callback(module.SyncRefModelCallback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                told.append(f"begin {state.global_step}")
                return control

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                told.append(f"save {state.global_step}")
                return control

        class Model(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, size: int) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(size, device="cpu"))

        settings = {"output_dir": folder, "should_save": True}
        if not is_teacher:
            settings |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": alpha}
        args, control, policy, reference = (
            SimpleNamespace(**settings | arguments),
            SimpleNamespace(),
            Model(2),
            Model(size),
        )
        if is_sharded:
            # As DeepSpeed marks parameters under ZeRO-3.
            reference.weight.ds_id = 0
        answers = []
        with recorded_warnings() as self.warnings, shadowed(module, "AcceleratorState", _NoDeepSpeed):
            callback = Callback(ref_model=reference if has_reference else None, accelerator=None)
            for step in range(begin, end + 1):
                policy.weight.data.fill_(scale * (1 + step / 10))
                state = SimpleNamespace(global_step=step)
                event = callback.on_train_begin if step == begin else callback.on_step_end
                answers.append(event(args, state, control, model=policy))
                if begin < step and step in (1, 3):
                    Path(folder, f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
                    answers.append(callback.on_save(args, state, control, model=policy))
        self.weights = reference.weight.detach()
        if answers.count(control) != len(told) or len(told) != 1 + sum(begin < step <= end for step in (1, 3)):
            raise AssertionError(f"the callback's own methods are called as {told}, and answer {answers}")

    @property
    def reference(self) -> float:
        return float(self.weights[0])


class _NoDeepSpeed:
    """The state of accelerate in a run without DeepSpeed."""

    deepspeed_plugin = None
