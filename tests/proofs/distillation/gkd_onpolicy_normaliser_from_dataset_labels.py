"""Train two optimizer steps of two micro-batches with the real GKDTrainer on long completions, and evaluate.

The student writes them, or the teacher. Losses and accumulated gradients are compared with the divergence, which is
computed without TRL: that of each micro-batch is divided by its own tokens and the micro-batches.
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


ID = "gkd-onpolicy-normaliser-from-dataset-labels"
COMPUTES = "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss"
GENERATES = "trl.experimental.gkd.gkd_trainer:GKDTrainer.generate_on_policy_outputs"
STEPS, MICRO_BATCHES, BETA = 2, 2, 0.5


def train() -> tiny.TrainingResult:
    if not distillation.divides_by_a_count("GKD"):
        return tiny.TrainingResult(absent("the loss is a mean over the micro-batch"))
    with tiny.counted(ID, GENERATES) as counts:
        runs = {"student": _Run(lmbda=1.0), "teacher": _Run(lmbda=0.0, seq_kd=True)}
        acted = counts().acted
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"not all completions are treated alike: {outcomes}")
    generated = len(runs) * STEPS * MICRO_BATCHES
    if acted != (generated if outcomes[0].verdict is Verdict.FIXED else 0):
        raise AssertionError(f"{acted} of {generated} generations are counted")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on the dataset's completions, so the loss is over the dataset's tokens."""
    run = _Run(lmbda=0.0)
    run.judged()  # All conversations are equally long: the two counts are one.
    assert not run.acted, "the wrapper acts on what is not generated"
    return tiny.result_of_runs({"dataset": run}, absent("nothing is generated"))


class _Run:
    """A run of the real trainer on one conversation, where who generates writes longer completions each time."""

    def __init__(self, **settings: Any) -> None:
        from datasets import Dataset

        trainer_class, config_class = tiny.classes("GKD")
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        conversation = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
        data = Dataset.from_list([{"messages": conversation}] * 8)
        with tempfile.TemporaryDirectory() as folder:
            (student, self.student), self.teacher = (
                (tiny.llama(folder, seed=0) for _ in range(2)),
                tiny.llama(folder, seed=1),
            )
            student.generate = self.teacher.generate = distillation.growing_completions()
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=student,
                teacher_model=self.teacher,
                args=tiny.config(
                    config_class,
                    gradient_accumulation_steps=MICRO_BATCHES,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.5,
                    beta=BETA,
                    max_new_tokens=8,
                    max_length=16,
                    temperature=1.0,
                    **settings,
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tokenizer,
            )
            trainer.train()
            trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, COMPUTES, trainer)

    def judged(self) -> Outcome:
        """Judge all losses and gradients by the tokens of the micro-batch, or by those of the dataset."""
        outcomes = []
        for number, step in enumerate(self.steps):
            tokens = [distillation.predicted_labels(micro_batch.inputs) for micro_batch in step.micro_batches]
            items = [float(micro_batch.keywords["num_items_in_batch"]) for micro_batch in step.micro_batches]
            self.student.load_state_dict(step.weights)
            divisors = {"right": [MICRO_BATCHES * count for count in tokens], "wrong": items}
            for place, micro_batch in enumerate(step.micro_batches):
                total = float(self._divergence(micro_batch.inputs).detach())
                right, wrong = (total / divisors[name][place] for name in ("right", "wrong"))
                outcomes.append(judge(micro_batch.loss, right=right, wrong=wrong, tokens=tokens, items=items))
            kind = "right" if outcomes[-1].verdict is Verdict.FIXED else "wrong"

            def loss(model: Any, step: tiny.Step = step, by: list[float] = divisors[kind]) -> Any:
                return sum(
                    self._divergence(micro_batch.inputs) / count
                    for micro_batch, count in zip(step.micro_batches, by, strict=True)
                )

            difference = step.difference(tiny.expected_gradients(self.student, step.weights, loss))
            if difference > 1e-6 or len(step.micro_batches) != MICRO_BATCHES:
                raise AssertionError(f"step {number}: the gradients differ from {kind} by {difference}")
        if len(self.steps) != STEPS or len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"{len(self.steps)} steps, of several kinds: {outcomes}")
        if len(self.evaluations) != 2 or any(
            distillation.predicted_labels(evaluation.inputs) > 8 for evaluation in self.evaluations
        ):
            raise AssertionError(f"the evaluation is not of the dataset: {self.evaluations}")
        return outcomes[0]

    def _divergence(self, batch: dict[str, Any]) -> Any:
        return distillation.divergence(self.student, self.teacher, batch, beta=BETA)
