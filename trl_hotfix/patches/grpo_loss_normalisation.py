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

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, replaced_argument, shadowed
from ..model import Options, Outcome
from ..testing import stub_grpo_trainer, tiny_causal_lm


def normalise(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Give every sequence the same weight, or every token of all ranks."""
    over = _all_tokens if options["normalisation"] == "global" else _sequences
    return over(wrapped, instance, args, kwargs)


def _all_tokens(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply the loss and the metrics of this rank by its share of the tokens of all ranks, times the ranks."""
    accelerator = instance.accelerator
    tokens = argument(wrapped, args, kwargs, "inputs")["completion_mask"].sum()
    weight = tokens * accelerator.num_processes / accelerator.reduce(tokens, "sum")
    gather = accelerator.gather_for_metrics
    # kl and clip_ratio are means over the tokens of this rank until the trainer gathers them.
    with shadowed(
        accelerator, "gather_for_metrics", lambda value, *args, **kwargs: gather(value * weight, *args, **kwargs)
    ):
        return wrapped(*args, **kwargs) * weight


def _sequences(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give ``compute_loss`` a completion mask whose rows add up to 1, and the model the original one."""
    inputs = argument(wrapped, args, kwargs, "inputs")
    mask = inputs["completion_mask"]
    log_probs = instance._get_per_token_logps

    def with_binary_mask(model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> Any:
        return log_probs(model, input_ids, (attention_mask > 0).to(mask.dtype), logits_to_keep)

    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "completion_mask": mask / mask.sum(dim=1, keepdim=True).clamp(min=1)}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", inputs)
    with shadowed(instance, "_get_per_token_logps", with_binary_mask):
        return wrapped(*args, **kwargs)


def sequences_or_tokens_weigh_the_same(module: ModuleType, options: Options) -> Outcome:
    """Compare loss and ``kl`` of four unequally long sequences with the formula, for ``global`` on one rank of two."""
    import torch

    beta = 0.1
    lengths = torch.tensor([2, 4, 8, 6])
    mask = (torch.arange(8) < lengths.unsqueeze(1)).long()
    tokens = torch.arange(36).reshape(4, 9) % 11
    inputs: dict[str, Any] = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": tokens[:, 1:],
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "old_per_token_logps": None,
    }
    model = tiny_causal_lm(SimpleNamespace())
    attention_masks: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: attention_masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    next_token_log_probs = torch.log_softmax(model.weight[tokens[:, :-1]].detach(), dim=-1)
    log_probs = next_token_log_probs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    inputs["ref_per_token_logps"] = log_probs + 0.1 * lengths.unsqueeze(1)
    if not hasattr(module.GRPOTrainer, "_generate_and_score_completions"):
        return absent("0.14 generates in compute_loss; it has the loss of the paper (0.14.0, line 512)")
    # In a release with loss_type, only the loss of "grpo" is computed, from the given log-probs.
    has_loss_type = "loss_type" in module.GRPOConfig.__dataclass_fields__
    over_ranks = options["normalisation"] == "global"
    if over_ranks and has_loss_type:
        return absent("GRPOConfig has loss_type")
    trainer = stub_grpo_trainer(
        module,
        log_probs if has_loss_type else None,
        inputs["ref_per_token_logps"],
        loss_type="grpo",
        beta=beta,
        temperature=1.0,
        num_iterations=1,
    )
    tokens_elsewhere = 44 if over_ranks else 0  # on the other rank
    trainer.accelerator.num_processes = 2 if over_ranks else 1
    trainer.accelerator.reduce = lambda tokens, reduction: tokens + tokens_elsewhere
    loss = float(trainer.compute_loss(model, inputs).detach())

    # Of each token, exp(d) - d - 1 with d = reference - policy = length / 10, arXiv:2402.03300, equation 4.
    kl = torch.exp(0.1 * lengths) - 0.1 * lengths - 1
    loss_per_sequence = beta * kl - inputs["advantages"]

    def over_sequences(value: Any) -> float:
        return float(value.mean())

    def over_tokens(value: Any) -> float:
        return float((value * lengths).sum() / lengths.sum())

    def over_all_tokens(value: Any) -> float:
        return float(2 * (value * lengths).sum() / (lengths.sum() + tokens_elsewhere))

    right = over_all_tokens if over_ranks else over_sequences
    if over_ranks and math.isclose(loss, over_sequences(loss_per_sequence), rel_tol=1e-5):
        return absent("every sequence weighs the same, on every rank")
    outcome = judge(
        loss, right=right(loss_per_sequence), wrong=over_tokens(loss_per_sequence), lengths=lengths.tolist()
    )
    if not has_loss_type:
        metrics = trainer._metrics["train"] if trainer._metrics["train"] else trainer._metrics
        kl_outcome = judge(metrics["kl"][-1], right=right(kl), wrong=over_tokens(kl))
        if kl_outcome.verdict is not outcome.verdict:
            raise AssertionError(f"loss and kl are not of the same kind: {outcome}, {kl_outcome}")
        attended, expected = attention_masks[0], torch.cat([inputs["prompt_mask"], mask], dim=1)
        if not torch.equal(attended, expected) or attended.dtype != mask.dtype:
            raise AssertionError(f"the model was given another attention mask than the one of the batch: {attended}")
    if inputs["completion_mask"] is not mask:
        raise AssertionError("the inputs were changed, and the trainer uses them again")
    return outcome
