"""``auto_find_batch_size`` begins again after an out of memory, from weights that the attempt before has trained.

accelerate calls transformers' training loop again with a smaller batch. The loop begins at step 0, with all rows and a
new schedule, but has the model and the optimizer of the attempt before. If memory ran out in the first step, these are
as they were made. A later step, on a longer batch, has trained them already.

The loop is entered once for each attempt, so the layer is on ``_inner_training_loop``. What an attempt leaves stands in
the trainer until the next one begins.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Options, Outcome
from ...testing import StopConstruction, recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_FAILED = "_trl_hotfix_failed_attempt"


@wrapper
def tell_of_the_steps_before(call: Call, options: Options) -> Any:
    """Say how many steps have trained the weights of this attempt, or put the weights back."""
    trainer = call.trainer
    if not trainer.args.auto_find_batch_size:
        return call()
    steps, first = vars(trainer).pop(_FAILED, (0, []))
    if steps:
        call.act()
        _restore(trainer, first)
        if not first and trainer.accelerator.is_main_process:
            _log.warning(
                "%s: memory ran out after %d steps, and auto_find_batch_size begins again with a smaller batch: from "
                "the weights and the optimizer of these steps, on the same rows. Set per_device_train_batch_size to "
                "%s, or TRL_HOTFIX_OPTIONS=auto-batch-size-keeps-trained-weights.weights=restored",
                type(trainer).__name__,
                steps,
                call["batch_size"],
            )
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    kept = _copies(trainer) if options["weights"] == "restored" and not sharded else []
    before = trainer.state
    try:
        return call()
    except RuntimeError as error:
        from accelerate.utils.memory import should_reduce_batch_size  # type: ignore[import-untyped]

        # The loop makes a state of its own before its first step.
        if should_reduce_batch_size(error) and trainer.state is not before:
            vars(trainer)[_FAILED] = trainer.state.global_step - _resumed(call["resume_from_checkpoint"]), kept
        raise


def _resumed(checkpoint: Any) -> int:
    """Return the step of the checkpoint that the run goes on from."""
    from transformers import TrainerState

    return TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json"))).global_step if checkpoint else 0


def _copies(trainer: Any) -> list[tuple[Any, Any]]:
    """Return each trained weight, with a copy in the memory of the CPU."""
    return [(weight, weight.detach().cpu().clone()) for weight in trainer.model.parameters() if weight.requires_grad]


def _restore(trainer: Any, first: list[tuple[Any, Any]]) -> None:
    for weight, value in first:
        weight.data.copy_(value)
    if first:
        # What an optimizer knows of the weights. A resumed run loads it again.
        trainer.optimizer.state.clear()


def a_second_attempt_is_told_or_begins_anew(module: ModuleType, options: Options) -> Outcome:
    """Run out of memory after two steps, which move a weight from 1 to 2, and begin again."""
    import torch

    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    switches = dict.fromkeys(("is_deepspeed_enabled", "is_fsdp_enabled"), False)
    args = SimpleNamespace(auto_find_batch_size=True)
    trainer = stub_trainer(
        trainer_class, args, model=model, state=None, optimizer=SimpleNamespace(state={}), **switches
    )

    def train_two_steps() -> None:
        model.weight.data.fill_(2.0)
        trainer.state = SimpleNamespace(global_step=2)
        raise RuntimeError("CUDA out of memory.")

    def stop() -> None:
        raise StopConstruction

    with recorded_warnings() as lines:
        # The first that the loop calls.
        for trainer.accelerator.free_memory in (train_two_steps, stop):
            try:
                trainer._inner_training_loop(batch_size=4, args=args)
            except (RuntimeError, StopConstruction):
                continue
    return judge(len(lines) + int(model.weight.item() == 1.0), right=1, wrong=0)
