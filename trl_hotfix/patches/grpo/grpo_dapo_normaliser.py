"""GRPO divides the dapo, cispo and vespo losses by the token count of a whole generation.

DAPO (arXiv:2503.14476, equation 8) divides the sum of the token losses by the number of tokens of the batch that one
optimizer step sees. ``GRPOTrainer`` counts the tokens when it generates (TRL issue 5619).

TRL 1.9.1 corrects the count in training only (pull request 6024), since an evaluation batch is generated and scored in
one piece. The wrapper corrects the count and not the returned loss: from 1.7.0 on that contains the auxiliary loss of
mixture-of-experts models, which is divided correctly already.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent_on, judge, wrapper
from ...model import Outcome
from ...testing import stub_grpo_trainer

_BY_TOKEN_COUNT = ("dapo", "cispo", "vespo")


@wrapper
def count_the_tokens_of_one_optimizer_step(call: Call) -> Any:
    """Give ``_compute_loss`` the token count of one optimizer step instead of one generation."""
    trainer = call.trainer
    if trainer.loss_type not in _BY_TOKEN_COUNT or not call.is_training:
        return call()
    generated, accumulated = trainer.args.steps_per_generation, trainer.current_gradient_accumulation_steps
    if generated == accumulated:
        return call()
    inputs = call["inputs"]
    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] * accumulated / generated}
    return call.with_(inputs=inputs)()


@absent_on(ValueError, "Unknown loss type", "this release has no loss that is divided by a token count")
def loss_is_divided_by_the_tokens_of_one_optimizer_step(module: ModuleType) -> Outcome:
    """Let an optimizer step see two of four micro-batches, and add up the gradients of dapo for all log-probs.

    The ratio of the probabilities is 1, so that the derivative by a token's log-prob is -advantage / tokens.
    """
    import torch

    log_probs, lengths = torch.full((2, 8), -0.5, requires_grad=True), torch.tensor([[2], [8]])
    mask = (torch.arange(8) < lengths).long()
    inputs = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5]),
        "old_per_token_logps": None,
        "num_items_in_batch": torch.tensor(40),
    }
    trainer = stub_grpo_trainer(module, log_probs, loss_type="dapo", beta=0.0, steps_per_generation=4)
    trainer.current_gradient_accumulation_steps = 2
    (gradient,) = torch.autograd.grad(trainer._compute_loss(None, inputs), log_probs)
    return judge(float(gradient.sum()), right=2.0 / 20, wrong=2.0 / 40, tokens=40)
