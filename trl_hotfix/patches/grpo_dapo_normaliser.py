"""GRPO divides the dapo, cispo and vespo losses by the token count of a whole generation.

DAPO (arXiv:2503.14476, equation 8) divides the sum of the token losses by the number of tokens of the batch that one
optimizer step sees. ``GRPOTrainer`` counts the tokens when it generates (TRL issue 5619).

TRL 1.9.1 corrects the count in training only (pull request 6024), since an evaluation batch is generated and scored in
one piece. The wrapper corrects the count and not the returned loss: from 1.7.0 on that contains the auxiliary loss of
mixture-of-experts models, which is divided correctly already.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, judge, replaced_argument
from ..model import Outcome, Verdict
from ..testing import stub_grpo_trainer

_BY_TOKEN_COUNT = ("dapo", "cispo", "vespo")


def count_the_tokens_of_one_optimizer_step(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``_compute_loss`` the token count of one optimizer step instead of one generation."""
    if instance.loss_type not in _BY_TOKEN_COUNT or not instance.model.training:
        return wrapped(*args, **kwargs)
    generated, accumulated = instance.args.steps_per_generation, instance.current_gradient_accumulation_steps
    if generated == accumulated:
        return wrapped(*args, **kwargs)
    inputs = argument(wrapped, args, kwargs, "inputs")
    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] * accumulated / generated}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", inputs)
    return wrapped(*args, **kwargs)


def loss_is_divided_by_the_tokens_of_one_optimizer_step(module: ModuleType) -> Outcome:
    """Let an optimizer step see two of four micro-batches: its loss is twice that of a step that sees all four."""
    import torch

    def loss(kind: str, *, accumulated: int, generated: int, training: bool = True) -> float:
        trainer = stub_grpo_trainer(
            module,
            torch.full(mask.shape, -0.5),
            training=training,
            loss_type=kind,
            beta=0.0,
            steps_per_generation=generated,
        )
        trainer.current_gradient_accumulation_steps = accumulated
        return float(trainer._compute_loss(None, inputs))

    lengths = torch.tensor([2, 4, 8, 6])
    mask = (torch.arange(8) < lengths.unsqueeze(1)).long()
    inputs = {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "old_per_token_logps": None,
        "num_items_in_batch": torch.tensor(4 * 20),
    }
    outcomes = {}
    for kind in _BY_TOKEN_COUNT:
        try:
            full_step = loss(kind, accumulated=4, generated=4)
        except ValueError as error:
            if "Unknown loss type" not in str(error):
                raise
            continue
        outcomes[kind] = judge(
            loss(kind, accumulated=2, generated=4),
            right=2 * full_step,
            wrong=full_step,
            loss_type=kind,
            evaluation=loss(kind, accumulated=2, generated=4, training=False),
            tokens=80,
        )
        if abs(outcomes[kind].numbers["evaluation"] - full_step) > 1e-6:
            raise AssertionError(f"{kind}: an evaluation loss is not divided by the whole count: {outcomes[kind]}")
    if not outcomes:
        return absent("this release has none of the losses that are divided by a token count")
    # The ratio of the probabilities is 1: the loss is the sum of -advantage * length over 80 tokens, 1 / 80.
    if abs(outcomes["dapo"].numbers["right"] - 2 / 80) > 1e-6:
        raise AssertionError(f"dapo is not the sum of the token losses over their count: {outcomes['dapo']}")
    return next((outcome for outcome in outcomes.values() if outcome.verdict is not Verdict.FIXED), outcomes["dapo"])
