"""Formulas of options that are not at their default: another divergence, a temperature, the loss of a router."""

from __future__ import annotations

from typing import Any

from .by_hand import FORMULAS, Batch, _log_probs, _pairs, is_formula
from .odd_models import COEFFICIENT


@is_formula("DPO of JS")
def _dpo_js(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """f-DPO (Wang et al. 2023, table 1): f'(u) is log(2u / (1 + u)) for the divergence of Jensen and Shannon."""
    return _dpo_of(model, reference, batch, args, lambda ratio: 2 * ratio.exp() / (1 + ratio.exp()), takes_log=True)


@is_formula("DPO of alpha")
def _dpo_alpha(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """f-DPO (Wang et al. 2023, table 1): f'(u) is (1 - u^-a) / a for the alpha divergence."""
    alpha = 0.5
    return _dpo_of(model, reference, batch, args, lambda ratio: (1 - (-alpha * ratio).exp()) / alpha)


def _dpo_of(model: Any, reference: Any, batch: Batch, args: Any, derivative: Any, *, takes_log: bool = False) -> Any:
    import torch
    from torch.nn.functional import logsigmoid

    ids, mask, answers = _pairs(batch)
    with torch.no_grad():
        expected = _log_probs(reference, ids, mask)
    ratios = ((_log_probs(model, ids, mask) - expected) * answers).sum(1)
    values = derivative(ratios)
    chosen, rejected = (values.log() if takes_log else values).chunk(2)
    return -logsigmoid(args.beta * (chosen - rejected)).mean()


@is_formula("SFT of experts")
def _sft_of_experts(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """The loss, and that of the router (Fedus et al. 2021, equation 4) as the model computes it of the batch."""
    of_router = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True).aux_loss
    return FORMULAS["SFT"](model, reference, batch, args) + COEFFICIENT * of_router


@is_formula("GRPO at a temperature")
def _grpo_at_temperature(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """GRPO (Shao et al. 2024, equation 3) on the policy, which is the model at the temperature that it samples at."""
    counts = batch["completion_mask"]
    log_probs = _at_temperature(model, _both(batch, "ids"), _both(batch, "mask"), args.temperature)[
        :, -counts.shape[1] :
    ]
    ratio = (log_probs - log_probs.detach()).exp()
    gains = ratio * batch["advantages"][:, None] * counts
    # Since 0.16 the default is the mean of the tokens.
    if getattr(args, "loss_type", "grpo") != "grpo":
        return -gains.sum() / counts.sum()
    return -(gains.sum(1) / counts.sum(1)).mean()


def _at_temperature(model: Any, ids: Any, mask: Any, temperature: float) -> Any:
    import torch

    found = torch.zeros(ids.shape, dtype=torch.float64)
    rows = []
    for row, kept, empty in zip(ids, mask.bool(), found, strict=True):
        logits = model(input_ids=row[kept][None], use_cache=False).logits[0, :-1] / temperature
        of_words = logits.log_softmax(-1).gather(-1, row[kept][1:, None]).squeeze(-1)
        rows.append(empty.index_put((kept.nonzero().squeeze(-1)[1:],), of_words))
    return torch.stack(rows)


@is_formula("GRPO by sequence")
def _grpo_by_sequence(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """GRPO (Shao et al. 2024, equation 3): the mean of an answer's tokens, and the mean of these."""
    counts = batch["completion_mask"]
    log_probs = _log_probs(model, _both(batch, "ids"), _both(batch, "mask"))[:, -counts.shape[1] :]
    ratio = (log_probs - log_probs.detach()).exp()
    apart = batch["ref_per_token_logps"] - log_probs
    kl = apart.exp() - apart - 1
    if getattr(args, "use_bias_correction_kl", False):
        kl = kl * ratio
    losses = (args.beta * kl - ratio * batch["advantages"][:, None]) * counts
    return (losses.sum(1) / counts.sum(1)).mean()


def _both(batch: Batch, part: str) -> Any:
    """Return a part of the prompts and of the completions behind them."""
    import torch

    return torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1)


@is_formula("DPO with weights")
def _dpo_with_weights(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """WPO (Zhou et al. 2024, section 3.2): pairs weigh as probable as the policy finds them, at most 1."""
    import torch
    from torch.nn.functional import logsigmoid

    ids, mask, answers = _pairs(batch)
    with torch.no_grad():
        expected = _log_probs(reference, ids, mask)
        weights = _weights(model, ids, mask, answers)
    chosen, rejected = ((_log_probs(model, ids, mask) - expected) * answers).sum(1).chunk(2)
    return -(weights * logsigmoid(args.beta * (chosen - rejected))).mean()


def _weights(model: Any, ids: Any, mask: Any, answers: Any) -> Any:
    """Return the weight of each pair: the mean of log p(token) - log sum p^2 over each answer, and both together."""
    import torch

    of_rows = []
    for row, kept, counts in zip(ids, mask.bool(), answers.bool(), strict=True):
        log_probs = model(input_ids=row[kept][None], use_cache=False).logits[0, :-1].log_softmax(-1)
        own = log_probs.gather(-1, row[kept][1:, None]).squeeze(-1) - (2 * log_probs).logsumexp(-1)
        of_rows.append(own[counts[kept][1:]].mean())
    chosen, rejected = torch.stack(of_rows).chunk(2)
    return (chosen + rejected).exp().clamp(max=1)


@is_formula("CPO of one end")
def _cpo_of_one_end(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """CPO of answers that end once: a second end of sequence behind the first does not count."""
    import torch

    ids, mask, answers = _pairs(batch)
    ends = (ids == 1) & answers.bool()
    extra = ends & (ends.cumsum(1) > 1)
    kept = {"input_ids": ids, "attention_mask": mask.bool() & ~extra, "completion_mask": answers.bool() & ~extra}
    return FORMULAS["CPO"](model, reference, {name: each.to(torch.long) for name, each in kept.items()}, args)
