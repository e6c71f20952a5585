"""Train two steps of two unequal micro-batches with the real SFTTrainer, on a model that accepts no loss arguments.

The model is a Llama with ``accepts_loss_kwargs = False``, as image models have it: that is all that transformers looks
at. Losses and gradients are compared with the cross-entropy, computed without TRL, over the tokens of the step, and
with the mean of the means.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import sft_steps

OVERLAYS = ()
PARITY = False

ID, TARGET = "sft-vlm-mean-of-micro-batches", "trl.trainer.sft_trainer:SFTTrainer.__init__"
STEPS, MICRO_BATCHES = 2, 2
LENGTHS = (2, 3, 5, 8, 12, 17, 23, 30)
TEXTS = [" ".join(f"w{(7 * length + 3 * place) % 56}" for place in range(length)) for length in LENGTHS]


def train() -> tiny.TrainingResult:
    if not _computes_the_loss():
        return tiny.TrainingResult(absent("in this release the model computes the loss"))
    run = _Run(accepts=False)
    assert run.acted in (None, 1), run.acted
    return tiny.result_of_runs({"image model": run}, run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train a model that accepts them, and one that does not with other losses."""
    if not _computes_the_loss():
        return tiny.TrainingResult(absent("in this release the model computes the loss"))
    runs = {
        "text model": _Run(accepts=True),
        "smoothed": _Run(accepts=False, label_smoothing_factor=0.1),
        "own loss": _Run(accepts=False, own_loss=True),
        "subclass": _Run(accepts=False, subclass=True),
    }
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("the tokens are counted, or the loss is a mean"))


def _computes_the_loss() -> bool:
    from trl import SFTTrainer

    return "fused_lm_head" in str(inspect.unwrap(SFTTrainer.compute_loss).__code__.co_consts)


class _Run:
    """A run of the real trainer."""

    def __init__(self, *, accepts: bool, own_loss: bool = False, subclass: bool = False, **settings: Any) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        class OwnTrainer(SFTTrainer):  # type: ignore[misc]
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().compute_loss(*args, **kwargs)

        stepwise = tiny.stepwise(OwnTrainer if subclass else SFTTrainer)
        if not subclass:
            # It hands everything on: the wrapper may look through it.
            stepwise.compute_loss.__wrapped__ = SFTTrainer.compute_loss
        data = Dataset.from_list([{"text": text} for text in TEXTS])
        with tempfile.TemporaryDirectory() as folder:
            model, self.model = (tiny.llama(folder, seed=0) for _ in range(2))
            model.accepts_loss_kwargs = accepts
            trainer = tiny.trainer(
                stepwise,
                model=model,
                args=tiny.config(
                    SFTConfig,
                    gradient_accumulation_steps=MICRO_BATCHES,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.5,
                    max_length=32,
                    loss_type="nll",
                    **settings,
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tiny.tokenizer(),
                **({"compute_loss_func": _own_loss} if own_loss else {}),
            )
            trainer.train()
            trainer.evaluate()
        self.weights_after = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = tiny.acts(ID, TARGET, trainer)

    def judged(self) -> Outcome:
        """Judge all losses and gradients by the tokens of the step, and by those of each micro-batch."""
        outcomes = []
        for number, step in enumerate(self.steps):
            assert len(step.micro_batches) == MICRO_BATCHES
            batches = [sft_steps.rows_of(part.inputs) for part in step.micro_batches]
            first = sft_steps.first_counted(step.micro_batches)
            count = sum(sft_steps.labels_in(rows, first) for rows in batches)
            tokens = [sft_steps.labels_in(rows) for rows in batches]
            assert len(set(tokens)) == MICRO_BATCHES, tokens
            self.model.load_state_dict(step.weights)
            for part, rows, own in zip(step.micro_batches, batches, tokens, strict=True):
                total = float(sft_steps.cross_entropy(self.model, rows).detach())
                outcomes.append(judge(part.loss, right=total / count, wrong=total / own, count=count, tokens=own))
            is_right = outcomes[-1].verdict is Verdict.FIXED
            divisors = [count if is_right else MICRO_BATCHES * own for own in tokens]

            def loss(model: Any, batches: Any = batches, divisors: Any = divisors) -> Any:
                pairs = zip(batches, divisors, strict=True)
                return sum(sft_steps.cross_entropy(model, rows) / divisor for rows, divisor in pairs)

            difference = step.difference(tiny.expected_gradients(self.model, step.weights, loss))
            assert difference < 1e-5, f"step {number}: the gradients differ by {difference}"
        self.model.load_state_dict(self.weights_after)
        for evaluation in self.evaluations:
            rows = sft_steps.rows_of(evaluation.inputs)
            mean = float(sft_steps.cross_entropy(self.model, rows).detach()) / sft_steps.labels_in(rows)
            assert abs(evaluation.loss - mean) < 1e-5, (evaluation.loss, mean)
        assert (len(self.steps), len(self.evaluations)) == (STEPS, 2)
        assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
        return outcomes[0]


def _own_loss(outputs: Any, labels: Any, **kwargs: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
