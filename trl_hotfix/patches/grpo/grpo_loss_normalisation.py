"""GRPO of TRL 0.16 gives every token of a micro-batch the same weight, where the paper does so for every sequence.

The paper (DeepSeekMath, arXiv:2402.03300, equation 3) takes the mean over the sequences of the mean over the tokens of
each sequence:

    loss = mean_i( sum_t(l[i, t] * mask[i, t]) / sum_t(mask[i, t]) )       l, mask: (batch, completion length)

Pull requests 2881 (the loss) and 3004 (the ``kl`` metric) replaced it in 0.16.0 by the mean over all tokens of the
local batch (issue 2995). Pull request 3256 made it an option.

The method computes ``sum(l * mask) / sum(mask)`` for the loss and for its two metrics. With the weights
``mask / length`` in place of the mask it computes the means of the paper, because the weights of a sequence add up
to 1. The mask also tells the model which tokens to attend to, so on its way to the model it becomes 0 and 1 again.

0.16 does not give all tokens the same weight either if there are several ranks: each rank divides by its own tokens,
and the mean of the ranks' gradients gives the tokens of a rank with short completions more weight. For
``normalisation=global`` the loss and the logged metrics are multiplied by
``tokens of this rank * ranks / tokens of all ranks``, so that the mean over the ranks is the sum over all tokens
divided by their number.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Options, Outcome
from ...testing import stub_grpo_trainer


@wrapper
def normalise(call: Call, options: Options) -> Any:
    """Give every sequence the same weight, or every token of all ranks."""
    return _all_tokens(call) if options["normalisation"] == "global" else _sequences(call)


def _all_tokens(call: Call) -> Any:
    """Multiply the loss and the metrics of this rank by its share of the tokens of all ranks, times the ranks."""
    accelerator = call.trainer.accelerator
    tokens = call["inputs"]["completion_mask"].sum()
    weight = tokens * accelerator.num_processes / accelerator.reduce(tokens, "sum")
    gather = accelerator.gather_for_metrics
    # kl and clip_ratio are means over the tokens of this rank until the trainer gathers them.
    with shadowed(
        accelerator, "gather_for_metrics", lambda value, *args, **kwargs: gather(value * weight, *args, **kwargs)
    ):
        return call() * weight


def _sequences(call: Call) -> Any:
    """Give ``compute_loss`` a completion mask whose rows add up to 1, and the model the original one."""
    inputs = call["inputs"]
    mask = inputs["completion_mask"]
    log_probs = call.trainer._get_per_token_logps

    def with_binary_mask(model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> Any:
        return log_probs(model, input_ids, (attention_mask > 0).to(mask.dtype), logits_to_keep)

    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "completion_mask": mask / mask.sum(dim=1, keepdim=True).clamp(min=1)}
    with shadowed(call.trainer, "_get_per_token_logps", with_binary_mask):
        return call.with_(inputs=inputs)()


def sequences_or_tokens_weigh_the_same(module: ModuleType, options: Options) -> Outcome:
    """Differentiate the loss by the log-prob of a sequence of one token, beside one of three, on one rank of two.

    With an advantage of -1 it is the weight of the token: half of a mean over sequences, a quarter of one over the
    tokens of this rank, and an eighth of one over all tokens if the other rank has twelve.
    """
    import torch

    if not hasattr(module.GRPOTrainer, "_generate_and_score_completions"):
        return absent("this release has the loss of the paper")
    over_ranks = options["normalisation"] == "global"
    if over_ranks and "loss_type" in module.GRPOConfig.__dataclass_fields__:
        return absent("GRPOConfig has loss_type")
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    # In a release with loss_type, only the loss of "grpo" is computed.
    trainer = stub_grpo_trainer(module, log_probs, loss_type="grpo", beta=0.0, temperature=1.0, num_iterations=1)
    if over_ranks:
        vars(trainer.accelerator).update(num_processes=2, reduce=lambda tokens, reduction: tokens + 12)
    inputs = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.ones(2, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
        "advantages": torch.tensor([-1.0, 1.0]),
        "old_per_token_logps": None,
    }
    (gradient,) = torch.autograd.grad(trainer.compute_loss(trainer.model, inputs), log_probs)
    return judge(float(gradient[0, 0]), right=1 / 8 if over_ranks else 1 / 2, wrong=1 / 4)
