"""GRPO of 0.16 weighs every token of a micro-batch the same, where the paper weighs every sequence the same.

The paper (DeepSeekMath, arXiv:2402.03300, equation 3) takes the mean over the sequences of the mean over the tokens of
each:

    loss = mean_i( sum_t(l[i, t] * mask[i, t]) / sum_t(mask[i, t]) )       l, mask: (batch, completion length)

So did TRL up to 0.15.2. Pull requests 2881 (the loss) and 3004 (the ``kl`` metric) made 0.16.0 take the mean over all
tokens of the local batch, without a choice (issue 2995): a completion of 800 tokens pulls 100 times as hard as one
of 8, and how hard depends on what it shares its micro-batch with. 0.17.0 made it a choice again, ``loss_type="grpo"``
(pull request 3256).

The method computes ``sum(l * mask) / sum(mask)`` for the loss and for its two metrics. Given weights ``mask / length``
in the place of the mask it computes the means of the paper, as the weights of a sequence add up to 1. The mask is also
what tells the model which tokens to attend to, so on its way there it is made whole again.

Who wants every token to weigh the same does not get that from 0.16 either: each rank divides by its own tokens, and
the mean of the ranks' gradients weighs the tokens of a rank with short completions more. ``normalisation=global``
multiplies the loss, and what is logged, by ``tokens of this rank * ranks / tokens of all ranks``, so that the mean over
the ranks is the sum over all tokens divided by their number. Micro-batches of gradient accumulation still weigh the
same each: how many tokens the later ones will have is not known yet when the first is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, replaced_argument, shadowed
from ..model import Options, Outcome
from ..stubs import stub_grpo_trainer, tiny_causal_lm


def normalise(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Have every sequence weigh the same, or every token of all ranks."""
    over = _all_tokens if options["normalisation"] == "global" else _sequences
    return over(wrapped, instance, args, kwargs)


def _all_tokens(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply the loss and the metrics of this rank by its share of the tokens of all ranks."""
    accelerator = instance.accelerator
    tokens = argument(wrapped, args, kwargs, "inputs")["completion_mask"].sum()
    weight = tokens * accelerator.num_processes / accelerator.reduce(tokens, "sum")
    gather = accelerator.gather_for_metrics
    # kl and clip_ratio are means over this rank's tokens on their way to the mean over the ranks.
    with shadowed(
        accelerator, "gather_for_metrics", lambda value, *rest, **more: gather(value * weight, *rest, **more)
    ):
        return wrapped(*args, **kwargs) * weight


def _sequences(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give ``compute_loss`` a completion mask whose rows add up to 1, and the model the one that it was."""
    inputs = argument(wrapped, args, kwargs, "inputs")
    mask = inputs["completion_mask"]
    log_probs = instance._get_per_token_logps

    def of_whole_tokens(model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> Any:
        return log_probs(model, input_ids, (attention_mask > 0).to(mask.dtype), logits_to_keep)

    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "completion_mask": mask / mask.sum(dim=1, keepdim=True).clamp(min=1)}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", inputs)
    with shadowed(instance, "_get_per_token_logps", of_whole_tokens):
        return wrapped(*args, **kwargs)


def sequences_or_tokens_weigh_the_same(module: ModuleType, options: Options) -> Outcome:
    """The loss and the ``kl`` of four sequences of unequal length, for ``global`` on one rank of two."""
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
    given: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, named: given.append(named["attention_mask"]), with_kwargs=True)
    of_next = torch.log_softmax(model.weight[tokens[:, :-1]].detach(), dim=-1)
    log_probs = of_next.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    inputs["ref_per_token_logps"] = log_probs + 0.1 * lengths.unsqueeze(1)
    if not hasattr(module.GRPOTrainer, "_generate_and_score_completions"):
        return absent("0.14 generates in compute_loss; it has the loss of the paper (0.14.0, line 512)")
    # Where there is a choice of the loss, its own part of it is looked at: nothing is left to repair on the way there.
    chosen = "loss_type" in module.GRPOConfig.__dataclass_fields__
    everywhere = options["normalisation"] == "global"
    if everywhere and chosen:
        return absent("GRPOConfig has loss_type")
    trainer = stub_grpo_trainer(
        module,
        log_probs if chosen else None,
        inputs["ref_per_token_logps"],
        loss_type="grpo",
        beta=beta,
        temperature=1.0,
        num_iterations=1,
    )
    others = 44 if everywhere else 0  # the tokens of the other rank
    trainer.accelerator.num_processes = 2 if everywhere else 1
    trainer.accelerator.reduce = lambda tokens, reduction: tokens + others
    loss = float(trainer.compute_loss(model, inputs).detach())

    # Of each token, exp(d) - d - 1 with d = reference - policy = length / 10, arXiv:2402.03300, equation 4.
    kl = torch.exp(0.1 * lengths) - 0.1 * lengths - 1
    of_each = beta * kl - inputs["advantages"]

    def over_sequences(value: Any) -> float:
        return float(value.mean())

    def over_tokens(value: Any) -> float:
        return float((value * lengths).sum() / lengths.sum())

    def over_all_tokens(value: Any) -> float:
        return float(2 * (value * lengths).sum() / (lengths.sum() + others))

    right = over_all_tokens if everywhere else over_sequences
    if everywhere and math.isclose(loss, over_sequences(of_each), rel_tol=1e-5):
        return absent("every sequence weighs the same, on every rank")
    outcome = judge(loss, right=right(of_each), wrong=over_tokens(of_each), lengths=lengths.tolist())
    if not chosen:
        metrics = trainer._metrics["train"] if trainer._metrics["train"] else trainer._metrics
        noted = judge(metrics["kl"][-1], right=right(kl), wrong=over_tokens(kl))
        if noted.verdict is not outcome.verdict:
            raise AssertionError(f"loss and kl are not of the same kind: {outcome}, {noted}")
        if not torch.equal(given[0], torch.cat([inputs["prompt_mask"], mask], dim=1)) or given[0].dtype != mask.dtype:
            raise AssertionError(f"the model was given another attention mask than the one of the batch: {given[0]}")
    if inputs["completion_mask"] is not mask:
        raise AssertionError("the inputs were changed, and the trainer uses them again")
    return outcome
