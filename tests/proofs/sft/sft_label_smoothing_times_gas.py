"""Train two optimizer steps of two micro-batches with label smoothing and the real SFTTrainer, and evaluate.

The rows are unequally long. Losses and accumulated gradients are compared with the smoothed cross-entropy of all tokens
of the step, divided by the number that transformers has counted, which is computed without TRL and transformers.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "before 1.15.0 transformers does not shift the labels of a compiled model when it smooths"}

EQUIVALENT = {"weigh_by_tokens: `outputs['logits'].sum()` -> `mean`": "it is multiplied by 0"}

ID = "sft-label-smoothing-times-gas"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
STEPS, MICRO_BATCHES, EPSILON = 2, 2, 0.2


def train() -> tiny.TrainingResult:
    why = _why_absent()
    if why:
        return tiny.TrainingResult(absent(why))
    run = _Run(EPSILON)
    return _result(run, run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train without label smoothing, and where other losses take no notice of it."""
    from dataclasses import fields

    from trl import SFTConfig

    runs = {"plain": _Run(0.0), "own": _Run(EPSILON, own_loss=True)}
    if "loss_type" in {field.name for field in fields(SFTConfig)}:
        runs["dft"] = _Run(EPSILON, loss_type="dft")
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts in the run {name}"
    results = {name: _result(run, absent("no loss is smoothed")) for name, run in runs.items()}
    gradients = {f"{name} {key}": value for name, result in results.items() for key, value in result.gradients.items()}
    losses = [result.loss or 0.0 for result in results.values()]
    return tiny.TrainingResult(absent("no loss is smoothed"), sum(losses), gradients)


def _why_absent() -> str:
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother
    from trl import SFTTrainer

    if "num_items_in_batch" not in inspect.signature(Trainer.compute_loss).parameters:
        return "this transformers divides by the micro-batches"
    if "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters:
        return "this transformers divides the smoothed loss by the count"
    return "" if "compute_loss" in vars(SFTTrainer) else "SFT has no loss of its own"


def _result(run: _Run, outcome: Outcome) -> tiny.TrainingResult:
    gradients = {
        f"{number} {key}": value for number, step in enumerate(run.steps) for key, value in step.gradients.items()
    }
    micro_batches = [micro_batch for step in run.steps for micro_batch in step.micro_batches]
    return tiny.TrainingResult(outcome, sum(part.loss for part in [*micro_batches, *run.evaluations]), gradients)


class _Run:
    """A run of the real trainer on rows of two to ten tokens."""

    def __init__(self, epsilon: float, *, own_loss: bool = False, loss_type: str = "nll") -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        texts = [f"w{number} w{number + 1}" + " w9 w8" * (number % 5) for number in range(8)]
        data = Dataset.from_list([{"text": text} for text in texts])
        with tempfile.TemporaryDirectory() as folder:
            model, self.model = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.trainer(
                tiny.stepwise(SFTTrainer),
                model=model,
                args=tiny.config(
                    SFTConfig,
                    label_smoothing_factor=epsilon,
                    gradient_accumulation_steps=MICRO_BATCHES,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.5,
                    dataset_text_field="text",
                    max_length=16,
                    max_seq_length=16,
                    loss_type=loss_type,  # With the default of 1.7.0 to 1.14.2 label smoothing crashes.
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tiny.tokenizer(),
                data_collator=_collated,
            )
            if own_loss:
                trainer.compute_loss_func = _own_loss
            trainer.train()
            trainer.evaluate()
        self.weights_after = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, TARGET, trainer)

    def judged(self) -> Outcome:
        """Judge all losses and gradients by the count of the step, or by the tokens of each micro-batch."""
        outcomes = []
        for number, step in enumerate(self.steps):
            outcomes += [self._judged(micro_batch, step.weights) for micro_batch in step.micro_batches]
            is_right = outcomes[-1].verdict is Verdict.FIXED

            def loss(model: Any, step: tiny.Step = step, is_right: bool = is_right) -> Any:
                return sum(
                    _smoothed(model, part.inputs) / _divisors(part)["right" if is_right else "wrong"]
                    for part in step.micro_batches
                )

            difference = step.difference(tiny.expected_gradients(self.model, step.weights, loss))
            if difference > 1e-5 or len(step.micro_batches) != MICRO_BATCHES:
                raise AssertionError(f"step {number}: the gradients differ by {difference}")
        if len(self.steps) != STEPS or len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"{len(self.steps)} steps, of several kinds: {outcomes}")
        evaluated = {self._judged(evaluation, self.weights_after).verdict for evaluation in self.evaluations}
        if len(self.evaluations) != 2 or not evaluated <= {outcomes[0].verdict, Verdict.FIXED}:
            raise AssertionError(f"{len(self.evaluations)} batches are evaluated: {evaluated}")
        return outcomes[0]

    def _judged(self, micro_batch: tiny.MicroBatch, weights: dict[str, Any]) -> Outcome:
        self.model.load_state_dict(weights)
        total = float(_smoothed(self.model, micro_batch.inputs).detach())
        divisors = _divisors(micro_batch)
        by = {name: total / divisor for name, divisor in divisors.items()}
        return judge(micro_batch.loss, **by, divided_by=divisors["right"], tokens=divisors["wrong"])


def _divisors(micro_batch: tiny.MicroBatch) -> dict[str, float]:
    """Return the count of the step, without which the loss is a mean, and the tokens of the micro-batch."""
    tokens = float((micro_batch.inputs["labels"][:, 1:] != -100).sum())
    counted = micro_batch.keywords.get("num_items_in_batch")
    return {"right": tokens if counted is None else float(counted), "wrong": tokens}


def _smoothed(model: Any, batch: dict[str, Any]) -> Any:
    """Return the smoothed cross-entropy of the batch, summed over its tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = -logits.log_softmax(-1)
    of_labels = losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (((1 - EPSILON) * of_labels + EPSILON * losses.mean(-1)) * (labels != -100)).sum()


def _own_loss(outputs: Any, labels: Any, **kwargs: Any) -> Any:
    log_probs = outputs["logits"][:, :-1].log_softmax(-1)
    return -log_probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None]).mean()


def _collated(examples: list[Any]) -> dict[str, Any]:
    """Pad rows. Every token is a label."""
    import torch

    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
