"""Train two optimizer steps of two micro-batches with the real GOLDTrainer, and evaluate.

The student writes long completions, or learns from those of the dataset, which are unequally long. Losses and
accumulated gradients are compared with the divergence over all tokens of the step, which is computed without TRL.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import distillation

OVERLAYS = ()
PARITY = False

EQUIVALENT = {
    "divide_by_the_tokens_of_the_step: `(tokens == counted).all()` -> `any`": (
        "the count is one number, or on several GPUs of one process the same number for each"
    ),
}

ID = "gold-loss-normaliser-counts-dataset-labels"
TARGET = "trl.experimental.gold.gold_trainer:GOLDTrainer.compute_loss"
STEPS, BETA = 2, 0.5


def train() -> tiny.TrainingResult:
    if not distillation.divides_by_a_count("GOLD"):
        return tiny.TrainingResult(absent("the loss is a mean over the micro-batch"))
    runs = {"generated": _Run(2, lmbda=1.0), "dataset": _Run(2, lmbda=0.0)}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"not all completions are treated alike: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on the dataset's completions without accumulation, so the count is right."""
    run = _Run(1, lmbda=0.0)
    run.judged()
    assert not run.acted, "the wrapper acts where the count is right"
    return tiny.result_of_runs({"dataset": run}, absent("the count is right"))


class _Run:
    """A run of the real trainer. The student writes longer completions each time."""

    def __init__(self, micro_batches: int, **settings: Any) -> None:
        trainer_class, config_class = tiny.classes("GOLD")
        self.micro_batches = micro_batches
        data = _prompts_and_completions()
        with tempfile.TemporaryDirectory() as folder:
            (student, self.student), self.teacher = (
                (tiny.llama(folder, seed=0) for _ in range(2)),
                tiny.llama(folder, seed=1),
            )
            student.generate = distillation.growing_completions()
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=student,
                teacher_model=self.teacher,
                args=tiny.config(
                    config_class,
                    gradient_accumulation_steps=micro_batches,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.5,
                    beta=BETA,
                    max_completion_length=12,
                    max_length=24,
                    temperature=1.0,
                    **settings,
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tiny.tokenizer(),
            )
            trainer.train()
            trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, TARGET, trainer)

    def judged(self) -> Outcome:
        """Judge all losses and gradients by the tokens of the step, or by the number that Trainer has counted."""
        outcomes = []
        for number, step in enumerate(self.steps):
            tokens = sum(distillation.predicted_labels(micro_batch.inputs) for micro_batch in step.micro_batches)
            self.student.load_state_dict(step.weights)
            for micro_batch in step.micro_batches:
                counted = float(micro_batch.keywords["num_items_in_batch"])
                total = float(self._divergence(micro_batch.inputs).detach())
                numbers = {"tokens": tokens, "counted": counted}
                outcomes.append(judge(micro_batch.loss, right=total / tokens, wrong=total / counted, **numbers))
            divisor = tokens if outcomes[-1].verdict is Verdict.FIXED else counted

            def loss(model: Any, step: tiny.Step = step, divisor: float = divisor) -> Any:
                return sum(self._divergence(micro_batch.inputs) for micro_batch in step.micro_batches) / divisor

            difference = step.difference(tiny.expected_gradients(self.student, step.weights, loss))
            if difference > 1e-6 or len(step.micro_batches) != self.micro_batches:
                raise AssertionError(f"step {number}: the gradients differ by {difference}")
        if len(self.steps) != STEPS or len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"{len(self.steps)} steps, of several kinds: {outcomes}")
        self._judge_evaluations()
        return outcomes[0]

    def _judge_evaluations(self) -> None:
        """An evaluation is the mean over the tokens of its batch."""
        # The weights are those after the last step, with SGD.
        weights = self.steps[-1].weights
        moved = {name: weights[name] - 0.5 * value for name, value in self.steps[-1].gradients.items()}
        self.student.load_state_dict({**weights, **moved})
        for evaluation in self.evaluations:
            right = float(self._divergence(evaluation.inputs).detach()) / distillation.predicted_labels(
                evaluation.inputs
            )
            judge(evaluation.loss, right=right, wrong=right)
        if len(self.evaluations) != 2:
            raise AssertionError(f"{len(self.evaluations)} batches are evaluated, and not 2")

    def _divergence(self, batch: dict[str, Any]) -> Any:
        return distillation.divergence(self.student, self.teacher, batch, beta=BETA)


def _prompts_and_completions() -> Any:
    """Return tokenized rows: GOLD itself takes no tokenizer of words, since its loss across tokenizers needs bytes."""
    from datasets import Dataset

    tokenizer, rows = tiny.tokenizer(), []
    for number in range(16):
        prompt, completion = "w1 w2" + " w9" * (number % 2), " w3 w4 w5"[: 3 * (1 + number % 3)]
        ids, prompt_ids = (tokenizer(text)["input_ids"] for text in (prompt + completion, prompt))
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "completion_mask": [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids)),
                "original_prompt_text": prompt,
                "original_completion_text": completion,
            }
        )
    return Dataset.from_list(rows)
