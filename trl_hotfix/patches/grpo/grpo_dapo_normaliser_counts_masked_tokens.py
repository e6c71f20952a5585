"""GRPO counts the tokens of its dapo, cispo and vespo losses before it masks the truncated completions.

``_generate_and_score_completions`` returns ``num_items_in_batch`` of all completions of a generation, and a
``completion_mask`` that is 0 for those without an end. TRL 1.9.0 counts the tokens of that mask (pull request 6439).
The wrapper does the same with what the method returns. A tool's answers were never counted, and their mask is in the
product here, since a truncated completion may have called tools.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, absent_on, judge, wrapper
from ...model import Outcome
from ...testing import scored_completions, stub_grpo_trainer, stub_that_scores, tiny_causal_lm

_BY_TOKEN_COUNT = ("dapo", "cispo", "vespo")


@wrapper
def count_the_tokens_of_the_loss(call: Call) -> Any:
    """Return the batch with the number of tokens, of all ranks, that the loss is summed over."""
    output, trainer = call(), call.trainer
    if not trainer.mask_truncated_completions or trainer.loss_type not in _BY_TOKEN_COUNT:
        return output
    # The Liger loss does not read the count.
    if any(getattr(trainer, name, False) for name in ("use_liger_loss", "use_liger_kernel")):
        return output
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    tokens = trainer.accelerator.gather(mask.sum()).sum()
    if tokens == output["num_items_in_batch"]:
        return output
    # Without a token the loss is 0, and not 0 / 0.
    return {**output, "num_items_in_batch": tokens.clamp(min=1)}


@absent_on(ValueError, "Unknown loss type", "this release has no loss that is divided by a token count")
def loss_is_divided_by_the_tokens_that_it_has(module: ModuleType) -> Outcome:
    """Score a completion of two tokens and a truncated one of five, and add up the gradients for the log-probs.

    The ratio of the probabilities is 1, so that the derivative by a token's log-prob is -advantage / tokens.
    """
    import torch
    from transformers import GenerationConfig

    if "mask_truncated_completions" not in module.GRPOConfig.__dataclass_fields__:
        return absent("this release takes no truncated completions out of the loss")
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "beta": 0.0,
        "steps_per_generation": 1,
        "mask_truncated_completions": True,
    }
    model = tiny_causal_lm()
    model.generation_config = GenerationConfig(eos_token_id=1)
    completions = ((5, 1), (2, 3, 4, 6, 7))
    output = scored_completions(
        stub_that_scores(module, completions, [1.0, 4.0], model=model, reference=model, **settings)
    )
    log_probs = torch.full((2, 5), -0.5, requires_grad=True)
    loss = stub_grpo_trainer(module, log_probs, **settings)._compute_loss(None, output)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    of_a_token = -float(output["advantages"][0])
    return judge(float(gradient.sum()), right=2 * of_a_token / 2, wrong=2 * of_a_token / 7)
