"""Train two optimizer steps of two micro-batches with the real trainer, and evaluate.

IWOPDTrainer, or DistillationTrainer where there is no IW-OPD. The student writes long completions, or learns from
those of the dataset, which are unequally long. Losses and accumulated gradients are compared with the divergence over
all tokens of the step, which is computed without TRL.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from importlib import import_module
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import distillation
from tiny.data import left_padding_tokenizer

OVERLAYS = ()
PARITY = False

EQUIVALENT = {
    "divide_by_the_tokens_of_the_buffer: `(tokens == counted).all()` -> `any`": (
        "the count is one number, or on several GPUs of one process the same number for each"
    ),
}

ID = "distillation-normaliser-counts-dataset-labels"
STEPS, BETA, RATE = 2, 0.5, 0.5


def trainer_and_config() -> tuple[Any, Any, str]:
    """Return the trainer that counts the dataset's labels, its config, and the patched method, or None three times."""
    for folder, name in (("iw_opd", "IWOPD"), ("distillation", "Distillation")):
        with contextlib.suppress(ImportError, AttributeError):
            module = import_module(f"trl.experimental.{folder}.{folder}_trainer")
            found = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
            return *found, f"{module.__name__}:{name}Trainer.compute_loss"
    return None, None, ""


def train() -> tiny.TrainingResult:
    trainer_class, _, _ = trainer_and_config()
    if trainer_class is None:
        return tiny.TrainingResult(absent("this release has no such trainer"))
    if "num_items_in_batch" not in inspect.signature(trainer_class.generalized_jsd_loss).parameters:
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
        trainer_class, config_class, target = trainer_and_config()
        self.micro_batches = micro_batches
        words = left_padding_tokenizer()
        words.chat_template = tiny.chat_tokenizer().chat_template
        data = _conversations()
        settings = {"loss_top_k": 0, "distillation_objective": "jsd", "temperature": 1.0, **settings}
        settings |= {"max_completion_length": 12, "max_prompt_length": 12, "max_length": 24, "beta": BETA}
        settings |= {"gradient_accumulation_steps": micro_batches, "max_steps": STEPS}
        settings |= {"optim": "sgd", "learning_rate": RATE}
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as of_teacher:
            student, self.student = (tiny.llama(folder, seed=0) for _ in range(2))
            self.teacher = tiny.llama(of_teacher, seed=1)
            # The trainer compares its tokenizer with the student's.
            words.save_pretrained(of_teacher)
            self.teacher.config._name_or_path = of_teacher
            student.generate = distillation.growing_completions()
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=student,
                teacher_model=self.teacher,
                args=tiny.config(config_class, **settings),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=words,
            )
            trainer.train()
            trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, target, trainer)

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
        moved = {name: weights[name] - RATE * value for name, value in self.steps[-1].gradients.items()}
        self.student.load_state_dict({**weights, **moved})
        for evaluation in self.evaluations:
            total, tokens = self._divergence(evaluation.inputs), distillation.predicted_labels(evaluation.inputs)
            judge(evaluation.loss, right=float(total.detach()) / tokens, wrong=float(total.detach()) / tokens)
        if len(self.evaluations) != 2:
            raise AssertionError(f"{len(self.evaluations)} batches are evaluated, and not 2")

    def _divergence(self, batch: dict[str, Any]) -> Any:
        return distillation.divergence(self.student, self.teacher, batch, beta=BETA)


def _conversations() -> Any:
    """Return sixteen conversations of unequally long prompts and answers."""
    from datasets import Dataset

    rows = []
    for number in range(16):
        prompt, answer = "w1 w2" + " w9" * (number % 2), "w3 w4 w5"[: 2 + 3 * (number % 3)]
        turns = (("user", prompt), ("assistant", answer))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return Dataset.from_list(rows)
