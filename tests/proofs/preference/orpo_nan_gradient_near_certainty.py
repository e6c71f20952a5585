"""The proof: one step of the real ORPOTrainer with a Llama that is nearly certain of the chosen completion.

Each token of that completion determines the next one, through the embeddings and the head alone. The model is uncertain
of the rejected completion. The gradient for the log-prob of the chosen one is compared with the formula: the odds of
the rejected one, times beta.
"""

from __future__ import annotations

import math
import tempfile
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = False

EQUIVALENT = {
    "keep_away_from_certainty: `shift = torch.where(logps > _LARGEST_LOGP, _LARGEST_LOGP - logps, "
    "torch.zeros_like(logps)).detach()` -> `shift = torch.where(logps >= _LARGEST_LOGP, _LARGEST_LOGP - logps, "
    "torch.zeros_like(logps)).detach()`": "at the border itself the shift is 0",
    "applied twice": "what was shifted is the largest log-prob, and is not shifted again",
    "change detached": "the shift is detached in any case, and the gradient passes through to the log-prob",
}

BETA = 0.5
CHOSEN, REJECTED = "w10 w11 w12", "w20 w11 w12"


def train() -> tiny.TrainingResult:
    result = _train(gap=24.0)
    finite = all(bool(gradient.isfinite().all()) for gradient in result.gradients.values())
    if finite != (result.outcome.verdict is Verdict.FIXED):
        raise AssertionError(f"the gradients of the weights are {'' if finite else 'not '}finite: {result.outcome}")
    return result


def unaffected() -> tiny.TrainingResult:
    """Train a model that is less certain: the log-probs are some -0.001."""
    result = _train(gap=10.0)
    return tiny.TrainingResult(absent("the model is not so sure"), result.loss, result.gradients)


def _train(gap: float) -> tiny.TrainingResult:
    import torch
    from datasets import Dataset
    from packaging.version import Version

    trainer_class, config_class = tiny.classes("ORPO")
    odds_ratios: list[Any] = []

    class OddsRatioRecorder(tiny.measured(trainer_class)):
        def odds_ratio_loss(self, chosen: Any, rejected: Any) -> Any:
            result = super().odds_ratio_loss(chosen, rejected)
            gradients = torch.autograd.grad(result[0].sum(), (chosen, rejected), retain_graph=True)
            odds_ratios.append((rejected.detach(), *gradients))
            return result

    words = tiny.tokenizer()
    # Old releases need a beginning-of-sequence token and prepend it.
    words.bos_token = words.eos_token
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        _memorise(model, words(f"w1 {CHOSEN}")["input_ids"] + [words.eos_token_id], gap)
        rows = [{"prompt": f"{words.bos_token} w1", "chosen": f" {CHOSEN}", "rejected": f" {REJECTED}"}] * 4
        trainer = tiny.trainer(
            OddsRatioRecorder,
            model=model,
            args=tiny.config(config_class, beta=BETA, max_length=16, max_prompt_length=8),
            train_dataset=Dataset.from_list(rows),
            tokenizer=words,
        )
        trainer.train()
    rejected, chosen_gradient, rejected_gradient = odds_ratios[0]
    finite = float(torch.stack([chosen_gradient, rejected_gradient]).isfinite().sum())
    odds = math.exp(float(rejected[0])) / (1 - math.exp(float(rejected[0])))
    numbers = {"of_chosen": str(float(chosen_gradient[0])), "formula": BETA * odds, "rejected": float(rejected[0])}
    outcome = judge(finite, right=4.0, wrong=2.0, **numbers)
    # Up to 0.11.4 log(sigmoid(...)) rounds 1 minus the sigmoid, here times 2**22, to multiples of 2**-24.
    rounded = BETA * 2**-3 if Version(version("trl")) < Version("0.12.0") else 0.0
    as_in_formula = math.isclose(float(chosen_gradient[0]), BETA * odds, rel_tol=1e-3, abs_tol=rounded)
    if outcome.verdict is Verdict.FIXED and gap > 20 and not as_in_formula:
        raise AssertionError(f"the gradient is finite and not that of the formula: {outcome}")
    return tiny.TrainingResult(outcome, trainer.losses[0], trainer.step.gradients)


def _memorise(model: Any, ids: list[int], gap: float) -> None:
    """Make the model predict each of ``ids`` after the one before it, with a logit ``gap`` above all others."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()
            if name.endswith("embed_tokens.weight"):
                # Each word of ``ids`` has a direction of its own: the hidden state is that direction, of length 4.
                parameter.zero_()
                for place, word in enumerate(dict.fromkeys(ids)):
                    parameter[word, place] = 1.0
        head = model.get_output_embeddings().weight
        for place, follower in enumerate(ids[1:]):
            head[follower, place] = gap / 4
