"""Train two steps of two unequal micro-batches of a tiny Mixtral with label smoothing and the real SFTTrainer.

Losses and gradients are compared with the smoothed cross-entropy, computed without TRL and transformers, and half of
the auxiliary loss that the same model returns; the losses of an evaluation with all of it. Before 5.15.0 transformers
divides what is smoothed by the tokens of the micro-batch, which ``sft-label-smoothing-times-gas`` repairs: here it is
left as it is.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "before 1.15.0 transformers does not shift the labels of a compiled model when it smooths"}

ID, TARGET = "sft-moe-aux-loss-unused-with-smoothing", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
STEPS, MICRO_BATCHES, EPSILON, COEFFICIENT = 2, 2, 0.2, 0.5


def train() -> tiny.TrainingResult:
    if why := _why_absent():
        return tiny.TrainingResult(absent(why))
    run = _Run()
    outcome = run.judged()
    assert run.acted in (None, STEPS * MICRO_BATCHES + len(run.evaluations)), f"the wrapper acted {run.acted} times"
    return tiny.result_of_runs({"smoothed": run}, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train without smoothing, with a loss of the user's, without the router's loss, and a dense model."""
    if why := _why_absent():
        return tiny.TrainingResult(absent(why))
    runs = {
        "plain": _Run(epsilon=0.0),
        "own": _Run(own_loss=True),
        "zero": _Run(coefficient=0.0),
        "dense": _Run(dense=True),
    }
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("nothing is smoothed, or there is no such term"))


def _why_absent() -> str:
    from trl import SFTTrainer

    if not inspect.unwrap(SFTTrainer.compute_loss).__module__.startswith("trl."):
        return "the trainer has the compute_loss of transformers"
    return "the trainer adds the term itself, whatever the loss" if version("trl") == "0.23.0" else ""


class _Run:
    """A run of the real trainer."""

    def __init__(
        self,
        epsilon: float = EPSILON,
        *,
        coefficient: float = COEFFICIENT,
        dense: bool = False,
        own_loss: bool = False,
    ) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_list([{"text": "w2 w6 w10 w14"}] * 8)
        with tempfile.TemporaryDirectory() as folder:
            make, options = (tiny.llama, {}) if dense else (tiny.mixtral, {"coefficient": coefficient})
            model, self.model = (make(folder, seed=0, **options) for _ in range(2))
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
                    loss_type="nll",  # With the default of 1.7.0 to 1.14.2 label smoothing crashes.
                    **({} if dense else {"router_aux_loss_coef": coefficient}),
                ),
                train_dataset=rows,
                eval_dataset=rows.select(range(4)),
                tokenizer=tiny.tokenizer(),
                data_collator=_FixedBatches(),
            )
            if own_loss:
                trainer.compute_loss_func = _own_loss
            trainer.train()
            trainer.evaluate()
        self.weights_after = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, TARGET, trainer)

    def judged(self) -> Outcome:
        """Judge all losses and gradients by the formula with the router's loss, and by the one without."""
        outcomes = []
        for number, step in enumerate(self.steps):
            assert len(step.micro_batches) == MICRO_BATCHES
            outcomes += [self._judged(part, step.weights, 1 / MICRO_BATCHES) for part in step.micro_batches]
            share = COEFFICIENT / MICRO_BATCHES if outcomes[-1].verdict is Verdict.FIXED else 0.0

            def loss(model: Any, step: tiny.Step = step, share: float = share) -> Any:
                parts = [_smoothed_and_aux_loss(model, part) for part in step.micro_batches]
                return sum(smoothed + share * aux_loss for smoothed, aux_loss in parts)

            difference = step.difference(tiny.expected_gradients(self.model, step.weights, loss))
            assert difference < 1e-5, f"step {number}: the gradients differ by {difference}"
        outcomes += [self._judged(evaluation, self.weights_after, 1.0) for evaluation in self.evaluations]
        assert (len(self.steps), len(self.evaluations)) == (STEPS, 2)
        assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
        return outcomes[0]

    def _judged(self, micro_batch: tiny.MicroBatch, weights: dict[str, Any], share: float) -> Outcome:
        self.model.load_state_dict(weights)
        smoothed, aux_loss = (float(value.detach()) for value in _smoothed_and_aux_loss(self.model, micro_batch))
        return judge(micro_batch.loss, right=smoothed + share * COEFFICIENT * aux_loss, wrong=smoothed)


class _FixedBatches:
    """A collator of batches of two rows of different lengths, one after the other, whatever the examples are."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, examples: Any) -> dict[str, Any]:
        import torch

        first = 5 + 3 * next(self.numbers)
        rows = [torch.arange(first, first + 6), torch.arange(first + 9, first + 9 + 2 + first % 4)]
        ids = torch.nn.utils.rnn.pad_sequence([row % 60 + 3 for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def _smoothed_and_aux_loss(model: Any, micro_batch: tiny.MicroBatch) -> tuple[Any, Any]:
    """Return the smoothed cross-entropy of a micro-batch, and its auxiliary loss."""
    batch = {key: micro_batch.inputs[key] for key in ("input_ids", "attention_mask")}
    outputs = model(**batch, output_router_logits=True)
    labels = micro_batch.inputs["labels"][:, 1:]
    losses = -outputs.logits[:, :-1].log_softmax(-1)
    of_labels = losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smoothed = (((1 - EPSILON) * of_labels + EPSILON * losses.mean(-1)) * (labels != -100)).sum()
    return smoothed / _divisor(micro_batch, labels), outputs.aux_loss


def _divisor(micro_batch: tiny.MicroBatch, labels: Any) -> float:
    """Return the count of the step, if transformers divides by it, and else the tokens of the micro-batch."""
    from transformers.trainer_pt_utils import LabelSmoother

    counted: Any = micro_batch.keywords.get("num_items_in_batch")
    divides = counted is not None and "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    return float(counted) if divides else float((labels != -100).sum())


def _own_loss(outputs: Any, labels: Any, **kwargs: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
