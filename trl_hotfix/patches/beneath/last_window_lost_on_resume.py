"""A run that is resumed within an epoch loses that epoch's last step, if it has fewer micro-batches than others.

The loop of transformers ends a step after ``gradient_accumulation_steps`` micro-batches, or at the last micro-batch of
the epoch. It counts the micro-batches of a resumed epoch from 0, and not from those that it skips, so it never sees the
last one. The gradients of that step stay, and are added to the first step of the next epoch, or are never applied. The
run ends a step early. transformers 4.57 counts the skipped ones.

Up to 4.51 an epoch loses its end with or without a checkpoint: ``epoch-tail-lost``. The count is a local variable of
the loop, where no method can change it. ``_load_rng_state`` is called once in a resumed run, after it has its state.
"""

from __future__ import annotations

import logging
import math
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")


@wrapper
def warn_of_the_last_step(call: Call) -> Any:
    """Warn on the main process if the epoch that a run is resumed in loses its last step."""
    trainer, rest = call.trainer, _rest(call.trainer)
    if rest:
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning(
                "%s: the last step of this resumed epoch has %d of %d micro-batches, and transformers below 4.57 never "
                "takes it. Their gradients go into the next epoch's first step, or nowhere, and the run ends a step "
                "early. Resume from a checkpoint at the end of an epoch, or with transformers 4.57",
                type(trainer).__name__,
                rest,
                trainer.args.gradient_accumulation_steps,
            )
    return call()


def _rest(trainer: Any) -> int:
    """Return the micro-batches of the step that is lost, or 0."""
    args, state, loader = trainer.args, trainer.state, trainer.callback_handler.train_dataloader
    if args.ignore_data_skip or not hasattr(loader, "__len__"):
        return 0
    micro_batches, of_a_step = len(loader), args.gradient_accumulation_steps
    steps = math.ceil(micro_batches / of_a_step)
    begun = state.global_step % steps
    ends_before = state.global_step - begun + steps > state.max_steps
    return 0 if begun == 0 or ends_before else micro_batches % of_a_step


def lost_step_is_reported(module: ModuleType) -> Outcome:
    """Resume after a step of an epoch of five micro-batches, two a step: one line says that the third step is lost."""
    import transformers
    from packaging.version import Version

    trainer_class = class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    if not Version("4.52") <= Version(transformers.__version__) < Version("4.57"):
        return absent("this transformers counts the skipped micro-batches, or loses the end of each epoch")

    class Loader(SimpleNamespace):
        def __len__(self) -> int:
            return 5

    trainer = stub_trainer(
        trainer_class,
        default_arguments(transformers.TrainingArguments, gradient_accumulation_steps=2, ignore_data_skip=False),
        state=SimpleNamespace(global_step=1, max_steps=3),
        callback_handler=SimpleNamespace(train_dataloader=Loader()),
    )
    with recorded_warnings() as lines:
        trainer._load_rng_state(None)
    return judge(sum("last step of this resumed epoch" in line for line in lines), right=1, wrong=0)
