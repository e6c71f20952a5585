"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO trainers, and evaluate.

The model ends its turns with a token of its own, after two, four or six tokens, and one turn not at all. It goes on to
eight tokens unless its ``generation_config`` lists that token as an end. The loss must cover what comes before it, with
``mask_truncated_completions`` and without.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = ">=0.22.0"
"""Earlier releases leave the division by the micro-batches to transformers, of which some do not divide."""

MUTANTS_ON = ("0.26.0",)

END_OF_TURN = 9
LENGTHS = (2, 4, 8, 6)
"""Tokens of the completions of a group, with the end of the turn. That of eight tokens has none."""
EQUIVALENT = {"applied twice": "the inner one lists the same ids"}


def train() -> tiny.TrainingResult:
    import trl

    runs = {method: _Run(method) for method in ("GRPO", "RLOO") if _scores_completions(method)}
    if not runs:
        return tiny.TrainingResult(absent("this release generates elsewhere"))
    outcomes = [run.judged("2486", wrong="8888") for run in runs.values()]
    if "mask_truncated_completions" in trl.GRPOConfig.__dataclass_fields__:
        for method in runs:
            outcomes.append(_Run(method, mask_truncated_completions=True).judged("2406", wrong="0000"))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"not all ends are known: {outcomes}")
    return tiny.TrainingResult(outcomes[0], runs["GRPO"].loss, runs["GRPO"].gradients)


def unaffected() -> tiny.TrainingResult:
    """Train models that list no end but the tokenizer's, or none."""
    runs = {
        f"{method} {ends}": _Run(method, ends)
        for method in ("GRPO", "RLOO")
        for ends in (1, [1], None)
        if _scores_completions(method)
    }
    for run in runs.values():
        if run.judged("2486", wrong="8888").verdict is not Verdict.REPRODUCED:
            raise AssertionError("a completion ends at a token that the model does not list")
    gradients = {f"{name}.{key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(absent("one end"), sum(run.loss for run in runs.values()), gradients)


def _scores_completions(method: str) -> bool:
    import trl

    trainer_class = getattr(trl, f"{method}Trainer", object)
    # 0.15 has no such method, and scores where it prepares the inputs.
    return hasattr(trainer_class, "_generate_and_score_completions") or (
        method == "GRPO" and hasattr(trainer_class, "_get_per_token_logps")
    )


class _Run:
    """A run of the real trainer, on a model whose ``generation_config`` lists ``ends``."""

    def __init__(self, method: str, ends: Any = (1, END_OF_TURN), **settings: Any) -> None:
        import trl

        with tempfile.TemporaryDirectory() as folder:
            policy = tiny.llama(folder, seed=0)
            policy.generation_config.eos_token_id = list(ends) if isinstance(ends, tuple) else ends
            # The loss of 0.16 is a mean over tokens.
            defaults = {"loss_type": "bnpo", "beta": 0.0, "num_iterations": 1, "gradient_accumulation_steps": 2}
            defaults |= {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "per_device_eval_batch_size": 4}
            trainer = tiny.grpo(
                tiny.stepwise(getattr(trl, f"{method}Trainer")),
                policy,
                getattr(trl, f"{method}Config"),
                prompts=["w1 w2 w3"] * 16,
                **{**defaults, **settings},
            )
            policy.generate = _writer(policy)
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(2)))
        steps = trainer.steps
        if [len(step.micro_batches) for step in steps] != [2, 2] or not trainer.evaluations:
            raise AssertionError(f"expected two steps of two micro-batches, and an evaluation: {steps}")
        self.micro_batches = [micro_batch for step in steps for micro_batch in step.micro_batches]
        self.loss = self.micro_batches[0].loss
        self.evaluations = trainer.evaluations
        self.gradients = {
            f"{number}.{name}": value for number, step in enumerate(steps) for name, value in step.gradients.items()
        }

    def judged(self, right: str, *, wrong: str) -> Any:
        """Judge how many tokens of each completion are trained on, given as digits, in the order of the lengths."""
        found = set()
        for micro_batch in (*self.micro_batches, *self.evaluations):
            # The trainer shuffles the completions of a generation. Their first tokens tell which is which.
            numbers = (micro_batch.inputs["completion_ids"][:, 0] - 20).div(10, rounding_mode="floor").tolist()
            lengths = micro_batch.inputs["completion_mask"].sum(1).tolist()
            found |= set(zip(numbers, lengths, strict=True))
        if len(found) != len(LENGTHS):
            raise AssertionError(f"the same completions are trained on in several ways: {found}")
        digits = "".join(str(length) for _, length in sorted(found))
        return judge(int(digits), right=int(right), wrong=int(wrong))


def _writer(policy: Any) -> Any:
    """Return a ``generate`` that writes eight tokens for each row, or up to the first end, padded with 0."""
    import torch

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        # 0.15 leaves it to the model what ends a completion.
        ends = getattr(generation_config, "eos_token_id", None) or policy.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        rows = []
        for row in range(len(input_ids)):
            number = row % len(LENGTHS)
            tokens = [20 + 10 * number + place for place in range(8)]
            if LENGTHS[number] < 8:
                tokens[LENGTHS[number] - 1] = END_OF_TURN
            length = LENGTHS[number] if END_OF_TURN in ends else 8
            rows.append([*tokens[:length], *[0] * (8 - length)])
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    return generate
