"""RLOO of 0.26 counts every micro-batch twice, and so takes every other part of a generation.

``_step`` says which part of the generation is next, and when to generate again. ``training_step`` is new in 0.26.0 and
counts, as GRPO's does; ``_prepare_inputs``, which it calls, had counted so far and still does. 0.27.0 (pull request
4706) counts in ``training_step`` alone. The wrapper takes back what ``_prepare_inputs`` has counted.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, stub_trainer


@wrapper
def leave_the_step_to_training_step(call: Call) -> Any:
    """Return the micro-batch, and have ``_step`` as it was before."""
    trainer = call.trainer
    step = trainer._step
    inputs = call()
    if trainer._step != step:
        trainer._step = step
        call.act()
    return inputs


def every_part_is_trained_on(module: ModuleType) -> Outcome:
    """Train on two micro-batches, the two parts of one generation, and count the generations."""
    import torch
    from transformers import Trainer

    trainer_class: Any = getattr(module, "RLOOTrainer", Trainer)
    prepare = trainer_class._prepare_inputs
    if prepare is Trainer._prepare_inputs:
        return absent("RLOO of this release does not keep a generation for several micro-batches")
    if reexported := absent_if_reexported(module, prepare):
        return reexported
    if module_of(trainer_class.training_step) is not module:
        return absent("_prepare_inputs alone counts")
    generations = []

    def generate(rows: Any) -> dict[str, Any]:
        generations.append(rows)
        return {"completion_ids": torch.ones(2, 1)}

    def train(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> None:
        trainer._prepare_inputs(inputs)

    # It comes before transformers' own in the method resolution order.
    parent = type("Parent", (Trainer,), {"training_step": train})
    trainer = stub_trainer(
        type("RLOOTrainer", (trainer_class, parent), {}),
        SimpleNamespace(steps_per_generation=2, num_iterations=1, report_to=[]),
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        current_gradient_accumulation_steps=2,
        _step=0,
        _buffered_inputs=None,
        _current_train_step_time=0.0,
        _metrics={"train": defaultdict(list)},
        _generate_and_score_completions=generate,
    )
    for _ in range(2):
        trainer.training_step(trainer.model, [], 1)
    return judge(len(generations), right=1, wrong=2)
