"""A GRPO or RLOO run that is resumed within a generation uses its prompts too often, and others not often enough.

A generation is for ``num_iterations * steps_per_generation`` micro-batches. ``_step`` counts them, to know when to
generate and which part of a generation is next. The dataloader of a resumed run skips the micro-batches that the
checkpoint has behind it; ``_step`` begins at 0. The trainer then generates as if a generation began there, for prompts
that the dataloader repeats fewer times than that.

The wrapper sets ``_step`` to the number of skipped micro-batches before the first one. The completions are gone, so TRL
generates again for the prompts that the dataloader gives. It does so whenever ``_buffered_inputs`` is None.

``training_step``, which calls ``_prepare_inputs``, is TRL's own from 0.26.0 on. It is the target there, since RLOO of
0.26 counts in ``_prepare_inputs`` too, and rloo-step-counted-twice takes that back.
"""

from __future__ import annotations

import inspect
import math
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...by_identity import ByIdentity
from ...model import Outcome
from ...testing import default_arguments, metrics_by_mode, stub_trainer, trainer_and_config

_begun: ByIdentity[Any] = ByIdentity()
"""The state of the last training that each trainer has begun: ``train()`` makes a new one."""


@wrapper
def go_on_within_the_generation(call: Call) -> Any:
    """Have the trainer count from where the dataloader is, before the first micro-batch of a training."""
    trainer = call.trainer
    if _begun.get(trainer) is not trainer.state:
        _begun[trainer] = trainer.state
        settings = trainer.args
        parts = getattr(settings, "steps_per_generation", None) or settings.gradient_accumulation_steps
        skipped, generation = _skipped(trainer), parts * trainer.num_iterations
        # What is buffered is of an earlier training of this trainer.
        if skipped % generation or trainer._step % generation:
            call.act()
            trainer._step, trainer._buffered_inputs = skipped, None
    return call()


def _skipped(trainer: Any) -> int:
    """Return how many micro-batches of this epoch transformers has the dataloader skip."""
    from transformers.trainer_utils import has_length

    step, args = trainer.state.global_step, trainer.args
    if not step or args.ignore_data_skip:
        return 0
    loader = trainer.callback_handler.train_dataloader
    if has_length(loader):  # A stream is one epoch.
        step %= math.ceil(len(loader) / args.gradient_accumulation_steps)
    return int(step * args.gradient_accumulation_steps)


def resumed_run_uses_each_prompt_twice(module: ModuleType) -> Outcome:
    """Resume after the first of two iterations on prompt 0, and see which prompt the second micro-batch has.

    The dataloader goes on with prompt 1 there. With the bug the generation for prompt 0 is used again.
    """
    import torch
    from transformers import Trainer
    from transformers.trainer_callback import TrainerState

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    names = inspect.unwrap(trainer_class._prepare_inputs).__code__.co_names
    # 0.16 generates by the step of the run.
    if "_step" not in names or "global_step" in names:
        return absent("a generation is for one step, or is made by the step of the run")
    counts_itself = module_of(trainer_class.training_step) is module
    used: list[int] = []

    class Parent(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> None:
            step = self._step  # type: ignore[has-type]
            used.append(int(self._prepare_inputs(inputs)["prompt_ids"][0]))
            if counts_itself:  # RLOO of 0.26 counts in _prepare_inputs too, which is another bug.
                self._step = step

    settings = {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 1, "report_to": []}
    trainer = stub_trainer(
        type(trainer_class.__name__, (trainer_class, Parent), {}),
        default_arguments(config_class, **settings),
        model=SimpleNamespace(training=True),
        control=SimpleNamespace(should_evaluate=False),
        state=TrainerState(global_step=1),
        callback_handler=SimpleNamespace(train_dataloader=range(8)),
        current_gradient_accumulation_steps=1,
        _generate_and_score_completions=lambda prompts: {"prompt_ids": torch.tensor([prompts])},
        _metrics=metrics_by_mode(),
        _current_train_step_time=0.0,
        _step=0,
        _buffered_inputs=None,
    )
    trainer.accelerator.gradient_accumulation_steps = 1  # Another patch of training_step asks for it.
    for prompt in (0, 1):
        trainer.training_step(None, [prompt], None)
    return judge(used[1], right=1, wrong=0)
