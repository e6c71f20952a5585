"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO trainers, and evaluate.

``generation_kwargs`` has an end of its own, at which the completions of a group end after two, four and six tokens; one
is truncated at eight. The tokens that are trained on must be these, with ``mask_truncated_completions`` and without,
and the gradients those of the loss on these tokens, computed a row at a time and without TRL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = False

MUTANTS_ON = ("0.26.0",)
EQUIVALENT = {"applied twice": "the inner one adds the same ids"}

ID = "grpo-generation-kwargs-eos-trains-padding"
END = 9
LENGTHS = (2, 4, 8, 6)
"""Tokens of the completions of a group, with the end. That of eight tokens has none."""
OF_ALL_TOKENS = (8, 8, 8, 8)
STEPS, MICRO_BATCHES = 2, 2


def train() -> tiny.TrainingResult:
    names = _trainers()
    if not names:
        return tiny.TrainingResult(absent("no trainer takes generation_kwargs"))
    runs = {name: _Run(name) for name in names}
    outcomes = [run.judged(OF_ALL_TOKENS) for run in runs.values()]
    # Up to 0.23 a completion without an end in it is truncated, and then one whose last token is no end and no padding.
    masked = (0, 0, 0, 0) if _minor() < (0, 24) else (8, 8, 0, 8)
    outcomes += [_Run(name, mask_truncated_completions=True).judged(masked, (2, 4, 0, 6)) for name in names]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the runs are not all of one kind: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with an end that is the tokenizer's, and with other generation_kwargs; no completion ends elsewhere."""
    runs = {}
    for name in _trainers():
        for number, asked in enumerate(({"eos_token_id": 1}, {"top_k": 3})):
            run = runs[f"{name} {number}"] = _Run(name, asked)
            assert run.judged(OF_ALL_TOKENS).verdict is Verdict.REPRODUCED, "a completion ends where nothing ends it"
            assert not run.acted, "the wrapper acts"
    return tiny.result_of_runs(runs, absent("no other end is asked for"))


def _minor() -> tuple[int, ...]:
    # ``trl.__version__`` is "unknown" in 0.22.0.
    return tuple(int(part) for part in version("trl").split(".")[:2])


def _trainers() -> list[str]:
    import trl

    return [
        name
        for name in ("GRPO", "RLOO")
        if "generation_kwargs" in getattr(getattr(trl, f"{name}Config", None), "__dataclass_fields__", ())
    ]


class _Run:
    """A run of a real trainer with these ``generation_kwargs``."""

    def __init__(self, name: str, asked: Any = None, **settings: Any) -> None:
        self.name = name
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                prompts=["w1 w2 w3"] * 16,
                generation_kwargs={"eos_token_id": [1, END]} if asked is None else asked,
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=4,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                # A mean over tokens.
                loss_type="bnpo",
                **settings,
            )
            policy.generate = _generate
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(2)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        assert [len(step.micro_batches) for step in self.steps] == [MICRO_BATCHES] * STEPS
        assert self.evaluations
        self.masks_some = "mask_truncated_completions" in settings
        target = f"{trainer_class.__module__}:{name}Trainer._generate_and_score_completions"
        self.acted = tiny.acts(ID, target, trainer)

    def judged(self, wrong: tuple[int, ...], right: tuple[int, ...] = LENGTHS) -> Any:
        """Judge how many tokens of each completion are trained on, and compare the gradients with those on them."""
        found = set()
        for micro_batch in (*(each for step in self.steps for each in step.micro_batches), *self.evaluations):
            mask = micro_batch.inputs["completion_mask"]
            lengths = mask.sum(1).tolist()
            found |= set(zip(_numbers(micro_batch.inputs), lengths, strict=True))
        if len(found) != len(LENGTHS):
            raise AssertionError(f"the same completions are trained on in several ways: {found}")
        digits = [int("".join(map(str, each))) for each in ([length for _, length in sorted(found)], right, wrong)]
        outcome = judge(digits[0], right=digits[1], wrong=digits[2])
        if not self.masks_some:
            self._compare(right if outcome.verdict is Verdict.FIXED else wrong)
        return outcome

    def _compare(self, lengths: tuple[int, ...]) -> None:
        for number, step in enumerate(self.steps):
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, lengths, factor))
                )
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert largest > 0.0
            assert min(differences) < 1e-5 * max(1.0, largest), (self.name, number, differences, largest)

    def _loss_of(self, step: tiny.Step, lengths: tuple[int, ...], factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, each.inputs, lengths) for each in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], lengths: tuple[int, ...]) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        gains = []
        for row, number in enumerate(_numbers(batch)):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            completion = batch["completion_ids"][row][: lengths[number]]
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()[None]
            gains.append(batch["advantages"][row] * (log_probs - log_probs.detach()).exp())
        return -torch.cat(gains).mean()


def _numbers(batch: dict[str, Any]) -> list[int]:
    """Return which completion of its group each row is. The trainer shuffles them; their first tokens tell it."""
    numbers: list[int] = (batch["completion_ids"][:, 0] - 20).div(10, rounding_mode="floor").tolist()
    return numbers


def _generate(input_ids: Any, **kwargs: Any) -> Any:
    """Write a completion for each row, padded with 0 behind its end."""
    import torch

    rows = []
    for row in range(len(input_ids)):
        number = row % len(LENGTHS)
        length = LENGTHS[number]
        tokens = [20 + 10 * number + place for place in range(length)]
        if length < max(LENGTHS):
            tokens[-1] = END
        rows.append([*tokens, *[0] * (max(LENGTHS) - length)])
    return torch.cat([input_ids, torch.tensor(rows)], dim=1)
