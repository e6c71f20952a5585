"""The losses of trainers beside TRL's main ones, each as its paper has it. ``by_hand.FORMULAS`` gets them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import materials
from .by_hand import FORMULAS, Batch, _log_probs, _pairs, is_formula
from .setting import Setting


@is_formula("KTO")
def _kto(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equations 7 and 8 of KTO (Ethayarajh et al. 2024), and APO-zero without pairs (D'Oosterlinck et al. 2024)."""
    import torch

    ratios, reference_point = _log_ratios(model, reference, batch, ""), torch.zeros(())
    if args.loss_type == "kto":
        reference_point = _log_ratios(model, reference, batch, "KL_").mean().clamp(min=0).detach()
    is_desirable = batch["label"].bool() if hasattr(batch["label"], "bool") else torch.tensor(batch["label"])
    sign = torch.where(is_desirable, 1.0, -1.0)
    weight = torch.where(is_desirable, args.desirable_weight, args.undesirable_weight)
    return (weight * (1 - (sign * args.beta * (ratios - reference_point)).sigmoid())).mean()


def _log_ratios(model: Any, reference: Any, batch: Batch, prefix: str) -> Any:
    """Return log pi(y|x) - log pi_ref(y|x) of each row. Early releases have a completion's labels for its mask."""
    import torch

    start = prefix if f"{prefix}input_ids" in batch else f"{prefix}completion_"
    ids, mask = batch[f"{start}input_ids"], batch[f"{start}attention_mask"]
    has_mask = f"{prefix}completion_mask" in batch
    answers = batch[f"{prefix}completion_mask"] if has_mask else batch[f"{start}labels"] != -100
    with torch.no_grad():
        expected = _log_probs(reference, ids, mask)
    return ((_log_probs(model, ids, mask) - expected) * answers).sum(1)


@is_formula("Reward")
def _reward(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Bradley and Terry (1952), with the rewards centred as Eisenstein et al. (2023) do."""
    from torch.nn.functional import logsigmoid

    if "input_ids" in batch:
        chosen, rejected = _rewards(model, batch["input_ids"], batch["attention_mask"]).chunk(2)
    else:
        sides = ((batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"]) for side in ("chosen", "rejected"))
        chosen, rejected = (_rewards(model, *side) for side in sides)
    centre = args.center_rewards_coefficient or 0.0
    return (-logsigmoid(chosen - rejected) + centre * (chosen + rejected) ** 2).mean()


def _rewards(model: Any, ids: Any, mask: Any) -> Any:
    import torch

    rows = zip(ids, mask.bool(), strict=True)
    return torch.stack([model(input_ids=row[kept][None], use_cache=False).logits[0, 0] for row, kept in rows])


@is_formula("PRM")
def _prm(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """The cross-entropy of the label at the end of each step (Uesato et al. 2022)."""
    import torch

    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    logits = torch.cat([model(input_ids=row[kept][None]).logits[0] for row, kept in rows])
    return torch.nn.functional.cross_entropy(logits, batch["labels"][batch["attention_mask"].bool()])


@is_formula("CPO")
def _cpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equation 4 of CPO (Xu et al. 2024), or with SimPO's term for the preference (Meng et al. 2024, equation 6)."""
    from torch.nn.functional import logsigmoid

    ids, mask, answers = _pairs(batch)
    counts = answers[:, 1:].sum(1)
    log_probs = (_log_probs(model, ids, mask) * answers).sum(1)
    is_mean = args.loss_type in ("simpo", "ipo")
    chosen, rejected = (log_probs / counts if is_mean else log_probs).chunk(2)
    margins = args.beta * (chosen - rejected)
    if args.loss_type == "hinge":
        preferred = (1 - margins).relu()
    elif args.loss_type == "ipo":
        preferred = (chosen - rejected - 1 / (2 * args.beta)) ** 2
    else:
        preferred = -logsigmoid(margins - (args.simpo_gamma if args.loss_type == "simpo" else 0.0))
    # The mean over tokens, where the paper has one over texts.
    likelihood = log_probs.chunk(2)[0].sum() / counts.chunk(2)[0].sum()
    return preferred.mean() - args.cpo_alpha * likelihood


@is_formula("ORPO")
def _orpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equations 4 to 7 of ORPO (Hong et al. 2024). All tokens of a chosen text count, as in its code."""
    from torch.nn.functional import logsigmoid

    ids, mask, answers = _pairs(batch)
    log_probs = _log_probs(model, ids, mask)
    chosen, rejected = ((log_probs * answers).sum(1) / answers[:, 1:].sum(1)).exp().chunk(2)
    odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    likelihood = log_probs.chunk(2)[0].sum() / mask.chunk(2)[0][:, 1:].sum()
    return -likelihood - args.beta * logsigmoid(odds.log()).mean()


@is_formula("TPO")
def _tpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """TPO and TPO-L (Saeidi et al. 2024, equations 8 and 10): a preference, and the likelihood of a gold answer."""
    from torch.nn.functional import logsigmoid

    answers = batch["completion_mask"]
    counts = answers[:, 1:].sum(1)
    log_probs = (_log_probs(model, batch["input_ids"], batch["attention_mask"]) * answers).sum(1)
    is_mean = args.loss_type == "tpo-l"
    chosen, rejected, _ = (log_probs / counts if is_mean else log_probs).chunk(3)
    preferred = logsigmoid(args.beta * (chosen - rejected) - (args.tpo_l_gamma if is_mean else 0.0))
    return -preferred.mean() - args.tpo_alpha * log_probs.chunk(3)[2].sum() / counts.chunk(3)[2].sum()


def _of_completions(model: Any, batch: Batch) -> Any:
    """Return the log-probability of each token of the completions."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return _log_probs(model, ids, mask)[:, -batch["completion_ids"].shape[1] :]


@is_formula("RLOO")
def _rloo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equation 7 of Ahmadian et al. (2024): REINFORCE for whole answers, whose advantages are in the batch."""
    log_probs = (_of_completions(model, batch) * batch["completion_mask"]).sum(1)
    return -((log_probs - log_probs.detach()).exp() * batch["advantages"]).mean()


@is_formula("GFPO")
def _gfpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """GFPO (Shrivastava et al. 2025, equation 3): GRPO with the answers that are kept."""
    return FORMULAS["GRPO"](model, reference, batch, args)


@is_formula("GMPO")
def _gmpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """GMPO (Zhao et al. 2025, equation 4): the geometric mean of the ratios of an answer's tokens."""
    counts = batch["completion_mask"]
    log_probs = _of_completions(model, batch)
    ratio = ((log_probs - log_probs.detach()) * counts).sum(1).div(counts.sum(1)).exp()
    apart = batch["ref_per_token_logps"] - log_probs
    kl = ((apart.exp() - apart - 1) * counts).sum(1) / counts.sum(1)
    return (args.beta * kl - ratio * batch["advantages"]).mean()


@is_formula("A2PO")
def _a2po(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equation 5 of A*-PO (Brantley et al. 2025): a regression to the reward beyond the optimal value."""
    import torch

    ids, mask, length = batch["input_ids"], batch["attention_mask"], batch["logits_to_keep"]
    with torch.no_grad():
        expected = _log_probs(reference, ids, mask)
    ratios = ((_log_probs(model, ids, mask) - expected) * mask)[:, -length:].sum(1)
    return ((args.beta2 * ratios - (batch["rewards"] - batch["v_star"])) ** 2).mean()


@is_formula("GKD")
def _gkd(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Equation 1 of GKD (Agarwal et al. 2024), averaged over the tokens of the answers."""
    return _divergence(model, batch["input_ids"], batch["attention_mask"], batch["labels"] != -100, args)


@is_formula("GOLD")
def _gold(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """Where the teacher has the same words, GOLD (Patiño et al. 2025) is GKD with a temperature."""
    answers = batch["labels"] != -100
    return _divergence(model, batch["input_ids"], batch["attention_mask"], answers, args, args.temperature)


@is_formula("IWOPD")
def _iw_opd(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """With the divergence for its objective, and all words, IW-OPD is GKD with a temperature too."""
    return _gold(model, reference, batch, args)


@is_formula("Distillation")
def _distillation(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    """The same of an answer of the student (``distillation_config.py``: temperature, beta)."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    answers = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], 1)
    return _divergence(model, ids, mask, answers, args, args.temperature)


def _divergence(model: Any, ids: Any, mask: Any, answers: Any, args: Any, temperature: float = 1.0) -> Any:
    """Return the mean of beta KL(teacher || mixture) + (1 - beta) KL(student || mixture) over the tokens of answers.

    The mixture is beta teacher + (1 - beta) student. In the limits it is KL(teacher || student) at 0, and the reverse
    at 1. The teacher is the one on disk.
    """
    import torch
    import transformers

    path = materials.saved_model(Path(args.output_dir).parent, Setting(), seed=1)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(path).double().eval()
    of_tokens = []
    for row, kept, counts in zip(ids, mask.bool(), answers.bool(), strict=True):
        words = row[kept][None]
        places = counts[kept][1:]
        with torch.no_grad():
            p = (teacher(input_ids=words).logits[0, :-1][places] / temperature).softmax(-1)
        q = (model(input_ids=words, use_cache=False).logits[0, :-1][places] / temperature).softmax(-1)
        mixture = args.beta * p + (1 - args.beta) * q
        if args.beta == 0:
            of_tokens.append(_kl(p, q))
        elif args.beta == 1:
            of_tokens.append(_kl(q, p))
        else:
            of_tokens.append(args.beta * _kl(p, mixture) + (1 - args.beta) * _kl(q, mixture))
    return torch.cat(of_tokens).mean()


def _kl(p: Any, q: Any) -> Any:
    return (p * (p / q).log()).sum(-1)
