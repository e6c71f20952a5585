"""Train optimizer steps of two micro-batches with the real RLOOTrainer on generations of two parts, and evaluate.

Which completions are trained on is compared with all of the generation, and accumulated gradients with those of the
loss over them (arXiv:2402.14740, section 3), which is computed without TRL. A second run trains twice on each
generation, the second time at other weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = True

ID, TARGET = "rloo-step-counted-twice", "trl.trainer.rloo_trainer:RLOOTrainer._prepare_inputs"
MICRO_BATCHES, CLIP = 2, 0.2
LENGTHS = (2, 4, 8, 6)

Row = tuple[str, int]
"""A prompt, and which of its four completions."""


def train() -> tiny.TrainingResult:
    trainer_class, _ = tiny.classes("RLOO")
    if not hasattr(trainer_class, "_calculate_rewards"):
        return tiny.TrainingResult(absent("RLOO of this release has a loop of its own"))
    runs = {"once": _Run(num_iterations=1), "twice": _Run(num_iterations=2)}
    outcomes = [run.judged() for run in runs.values()]
    if outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


class _Run:
    """A run whose generations have four completions of each of two prompts, and are for two micro-batches."""

    def __init__(self, num_iterations: int) -> None:
        trainer_class, config_class = tiny.classes("RLOO")
        self.num_iterations = num_iterations
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                LENGTHS,
                gradient_accumulation_steps=MICRO_BATCHES,
                num_iterations=num_iterations,
                per_device_eval_batch_size=4,
                max_steps=2,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                shuffle_dataset=False,
            )
            self.tokenizer = trainer.processing_class
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(4)))
        self.trainer, self.steps, self.evaluations = trainer, trainer.steps, trainer.evaluations

    def judged(self) -> Outcome:
        """Judge how many completions are trained on, and look at the gradients and what the wrapper did."""
        trained = [[self._rows(part.inputs) for part in step.micro_batches] for step in self.steps]
        if [len(parts) for parts in trained] != [MICRO_BATCHES] * 2 or len(self.evaluations) != 4:
            raise AssertionError(f"the micro-batches are {trained}, and {len(self.evaluations)} evaluations")
        counts = [len({row for part in parts for row in part}) for parts in trained]
        outcome = judge(counts[0], right=8, wrong=4)
        is_right = outcome.verdict is Verdict.FIXED
        if counts != [8 if is_right else 4] * 2:
            raise AssertionError(f"the steps train on {counts} completions")
        for number, step in enumerate(self.steps):
            # The first step of a generation is at the weights that it was drawn at.
            drawn_at = self.steps[0] if is_right and self.num_iterations == 2 else step
            rows = self._generated(number) if is_right else [row for part in trained[number] for row in part]
            expected = tiny.expected_gradients(self.policy, step.weights, self._loss_of(rows, drawn_at.weights))
            if not step.difference(expected) < 1e-5 or not any(value.any() for value in expected.values()):
                raise AssertionError(f"step {number}: the gradients differ by {step.difference(expected)}")
        acted = tiny.acts(ID, TARGET, self.trainer)
        if acted not in (None, MICRO_BATCHES * 2):
            raise AssertionError(f"the wrapper acts in {acted} of {MICRO_BATCHES * 2} micro-batches")
        return outcome

    def _generated(self, number: int) -> list[Row]:
        """Return the completions that the step of this number is for."""
        first = 0 if self.num_iterations == 2 else 2 * number
        return [(prompt, row) for prompt in tiny.PROMPTS[first : first + 2] for row in range(4)]

    def _rows(self, batch: dict[str, Any]) -> list[Row]:
        prompts = [
            self.tokenizer.decode(ids[mask.bool()])
            for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        # Of each completion the first token tells which one it is.
        return [(prompt, (int(ids[0]) - 10) // 7) for prompt, ids in zip(prompts, batch["completion_ids"], strict=True)]

    def _loss_of(self, rows: Sequence[Row], drawn_at: Any) -> Any:
        import torch

        def log_prob(model: Any, row: Row) -> Any:
            prompt, completion = self.tokenizer(row[0])["input_ids"], _completion(row[1])
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            return log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()

        now = self.policy.state_dict()
        now = {name: value.clone() for name, value in now.items()}
        self.policy.load_state_dict(drawn_at)
        with torch.no_grad():
            old = [log_prob(self.policy, row) for row in rows]
        self.policy.load_state_dict(now)

        def loss(model: Any) -> Any:
            gains = []
            for row, old_log_prob in zip(rows, old, strict=True):
                ratio = (log_prob(model, row) - old_log_prob).exp()
                advantage = _advantage(row[1])
                gains.append(torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
            return -torch.stack(gains).mean()

        return loss


def _completion(row: int) -> list[int]:
    """Return a completion of ``tiny.grpo``."""
    return [*(10 + (7 * row + 3 * place) % 50 for place in range(LENGTHS[row] - 1)), 1]


def _advantage(row: int) -> float:
    """Return how much more the reward of a completion is than the mean of the others': it is its length, scaled."""
    import statistics

    unit = (1 - 1e-4) / statistics.stdev(tiny.COMPLETION_LENGTHS)
    others = [length for place, length in enumerate(LENGTHS) if place != row]
    return unit * (LENGTHS[row] - statistics.mean(others))


def unaffected() -> tiny.TrainingResult:
    """Differentiate the loss of an evaluation's batch, and train GRPO."""
    import torch

    trainer_class, config_class = tiny.classes("RLOO")
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        trainer = tiny.grpo(tiny.stepwise(trainer_class), policy, config_class, LENGTHS, beta=0.0)
        trainer.steps, trainer.evaluations, trainer.is_new_step = [], [], True
        trainer.model.eval()
        with torch.enable_grad():
            rows = [trainer.train_dataset[row // 4] for row in range(8)]
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(rows))
        loss.backward()
    assert not tiny.acts(ID, TARGET, trainer), "the wrapper acts in an evaluation"
    return tiny.TrainingResult(absent("it is evaluated"), float(loss.detach()), tiny.gradients_of(trainer.model))
