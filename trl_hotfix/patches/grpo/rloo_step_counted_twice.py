"""RLOO of 0.26 counts every micro-batch twice, and so takes every other part of a generation.

``_step`` says which part of the generation is next, and when to generate anew. ``training_step`` is new in 0.26.0 and
counts, as GRPO's does; ``_prepare_inputs``, which it calls, had counted so far and still does. 0.27.0 (pull request
4706) counts in ``training_step`` alone. The wrapper takes back what ``_prepare_inputs`` has counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, judge, module_of
from ...model import Outcome, Verdict
from ...testing import absent_if_reexported, stub_trainer


def leave_the_step_to_training_step(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the micro-batch, and have ``_step`` as it was before."""
    step = instance._step
    inputs = wrapped(*args, **kwargs)
    if instance._step != step:
        instance._step = step
        act()
    return inputs


Part = tuple[int, int]
"""The number of a generation, and which of its parts."""


def every_part_is_trained_on(module: ModuleType) -> Outcome:
    """Train by stand-ins on the parts of generations: of two, three and four parts, once and twice, and evaluate."""
    from transformers import Trainer

    trainer_class: Any = getattr(module, "RLOOTrainer", Trainer)
    prepare = trainer_class._prepare_inputs
    if prepare is Trainer._prepare_inputs:
        return absent("RLOO of this release does not keep a generation for several micro-batches")
    if reexported := absent_if_reexported(module, prepare):
        return reexported
    if module_of(trainer_class.training_step) is not module:
        return absent("_prepare_inputs alone counts")
    outcomes = [_Case(trainer_class, *numbers).judged() for numbers in ((2, 1), (4, 1), (2, 2), (1, 2))]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    # With an odd number all parts are trained on, in another order.
    _Case(trainer_class, 3, 1).judged_order(is_right=outcomes[0].verdict is Verdict.FIXED)
    return outcomes[0]


class _Case:
    """A trainer whose generations have so many parts of two rows, each trained on so many times."""

    def __init__(self, trainer_class: type, parts: int, iterations: int) -> None:
        from transformers import Trainer

        self.parts, self.iterations, self.generations = parts, iterations, 0
        self.trained: list[Part] = []

        def train(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> None:
            self.trained.append(self._part_of(trainer._prepare_inputs(inputs)))

        # It comes before transformers' own in the method resolution order.
        parent = type("Parent", (Trainer,), {"training_step": train})
        self.trainer = stub_trainer(
            type("RLOOTrainer", (trainer_class, parent), {}),
            SimpleNamespace(steps_per_generation=parts, report_to=[]),
            model=SimpleNamespace(training=True),
            num_iterations=iterations,
            current_gradient_accumulation_steps=2,
            # Of ``profiling_decorator``.
            state=SimpleNamespace(global_step=0),
            _step=0,
            _buffered_inputs=None,
            _current_train_step_time=0.0,
            _metrics={"train": defaultdict(list)},
            _generate_and_score_completions=self._generated,
        )

    def _generated(self, rows: Any) -> dict[str, Any]:
        import torch

        self.generations += 1
        return {"completion_ids": torch.arange(2 * self.parts)[:, None]}

    def _part_of(self, inputs: dict[str, Any]) -> Part:
        buffered = self.trainer._buffered_inputs
        (place,) = (place for place, part in enumerate(buffered) if part["completion_ids"] is inputs["completion_ids"])
        return self.generations - 1, place

    def _trained(self) -> tuple[Sequence[Part], Sequence[Part], Sequence[Part]]:
        """Train on eight micro-batches. Return which parts these were, the right ones, and those by a double count."""
        for _ in range(8):
            self.trainer.training_step(self.trainer.model, [], 1)
        every = self.parts * self.iterations
        right = [(step // every, step % self.parts) for step in range(8)]
        first_steps = [step for step in range(0, 16, 2) if step % every == 0]
        wrong = [(sum(first <= step for first in first_steps) - 1, step % self.parts) for step in range(0, 16, 2)]
        return self.trained, right, wrong

    def judged(self) -> Outcome:
        """Judge how many generations there were, and look at which parts were trained on, and at an evaluation."""
        trained, right, wrong = self._trained()
        if trained not in (right, wrong):
            raise AssertionError(f"{trained} are trained on: expected {right}, or {wrong}")
        measured, *expected = (parts[-1][0] + 1 for parts in (trained, right, wrong))
        outcome = judge(measured, right=expected[0], wrong=expected[1], parts=len(set(trained)))
        self._check_times(trained == right)
        self._check_evaluation()
        return outcome

    def judged_order(self, *, is_right: bool) -> None:
        trained, right, wrong = self._trained()
        if trained != (right if is_right else wrong):
            raise AssertionError(f"{trained} are trained on: expected {right}, or {wrong} of a double count")

    def _check_times(self, is_right: bool) -> None:
        """Raise if the time of a step is not logged once for each two micro-batches, or for each by a double count."""
        times = len(self.trainer._metrics["train"]["step_time"])
        if times != (4 if is_right else 8):
            raise AssertionError(f"the times of {times} steps are logged")

    def _check_evaluation(self) -> None:
        """Raise if an evaluation does not generate, or counts."""
        step, generations = self.trainer._step, self.generations
        self.trainer.model.training = False
        self.trainer._prepare_inputs([])
        if (self.trainer._step, self.generations) != (step, generations + 1):
            raise AssertionError(f"an evaluation counts from {step} to {self.trainer._step}")
