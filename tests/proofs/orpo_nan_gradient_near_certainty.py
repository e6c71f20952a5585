"""The proof: one step of the real ORPOTrainer with a Llama that is sure of the chosen completion.

Each token of it says which is the next one: nothing but the embeddings and the head is at work. Of the rejected
completion it is not sure. The gradient for the log-prob of the chosen one is compared with the formula: the odds of the
rejected one, times beta.
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

BETA = 0.5
CHOSEN, REJECTED = "w10 w11 w12", "w20 w11 w12"


def train() -> tiny.TrainingResult:
    seen = _train(gap=24.0)
    finite = all(bool(each.isfinite().all()) for each in seen.gradients.values())
    if finite != (seen.outcome.verdict is Verdict.FIXED):
        raise AssertionError(f"the gradients of the weights are {'' if finite else 'not '}finite: {seen.outcome}")
    return seen


def unaffected() -> tiny.TrainingResult:
    """A model that is less sure: the log-probs are some -0.001."""
    seen = _train(gap=10.0)
    return tiny.TrainingResult(absent("the model is not so sure"), seen.loss, seen.gradients)


def _train(gap: float) -> tiny.TrainingResult:
    import torch
    from datasets import Dataset
    from packaging.version import Version

    trainer_class, config_class = tiny.classes("ORPO")
    measured: list[Any] = []
    losses: list[float] = []

    class Measured(trainer_class):  # type: ignore[misc]
        def odds_ratio_loss(self, chosen: Any, rejected: Any) -> Any:
            result = super().odds_ratio_loss(chosen, rejected)
            gradients = torch.autograd.grad(result[0].sum(), (chosen, rejected), retain_graph=True)
            measured.append((rejected.detach(), *gradients))
            return result

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    words = tiny.tokenizer()
    # Old releases need one and put it at the beginning.
    words.bos_token = words.eos_token
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        _know_by_heart(model, words(f"w1 {CHOSEN}")["input_ids"] + [words.eos_token_id], gap)
        rows = [{"prompt": f"{words.bos_token} w1", "chosen": f" {CHOSEN}", "rejected": f" {REJECTED}"}] * 4
        trainer = tiny.trainer(
            Measured,
            model=model,
            args=tiny.config(config_class, beta=BETA, max_length=16, max_prompt_length=8),
            train_dataset=Dataset.from_list(rows),
            tokenizer=words,
        )
        seen = tiny.FirstStep(model)
        trainer.train()
    rejected, of_chosen, of_rejected = measured[0]
    finite = float(torch.stack([of_chosen, of_rejected]).isfinite().sum())
    odds = math.exp(float(rejected[0])) / (1 - math.exp(float(rejected[0])))
    numbers = {"of_chosen": str(float(of_chosen[0])), "formula": BETA * odds, "rejected": float(rejected[0])}
    outcome = judge(finite, right=4.0, wrong=2.0, **numbers)
    # Up to 0.11.4 log(sigmoid(...)) rounds what a sigmoid lacks to 1, here times 2**22, to multiples of 2**-24.
    rounded = BETA * 2**-3 if Version(version("trl")) < Version("0.12.0") else 0.0
    of_formula = math.isclose(float(of_chosen[0]), BETA * odds, rel_tol=1e-3, abs_tol=rounded)
    if outcome.verdict is Verdict.FIXED and gap > 20 and not of_formula:
        raise AssertionError(f"the gradient is finite and not that of the formula: {outcome}")
    return tiny.TrainingResult(outcome, losses[0], seen.gradients)


def _know_by_heart(model: Any, ids: list[int], gap: float) -> None:
    """Have each of ``ids`` followed by the next one, with logits that are ``gap`` above those of all others."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()
            if name.endswith("embed_tokens.weight"):
                # One direction for each of the words that matter: the hidden state is that, of length 4.
                parameter.zero_()
                for place, word in enumerate(dict.fromkeys(ids)):
                    parameter[word, place] = 1.0
        head = model.get_output_embeddings().weight
        for place, follower in enumerate(ids[1:]):
            head[follower, place] = gap / 4
