"""Train two optimizer steps of two micro-batches with the real DPOTrainer and ``use_weighting``, and evaluate.

Losses and accumulated gradients are compared with WPO (arXiv:2406.11827): the loss of a pair times the likelihood of
its completions, clamped to 1, and without the clamp. Releases up to 0.28 leave the last token out of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps

ID, TARGET = "dpo-wpo-weights-not-clamped", "trl.trainer.dpo_trainer:DPOTrainer._compute_loss"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the proof scales the last norm of the whole model, so that weights are above 1"}
EQUIVALENT = {"applied twice": "a product that is divided by itself is 1"}


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer

    if not hasattr(DPOTrainer, "_compute_loss"):
        return tiny.TrainingResult(absent("this release clamps the weights, or has no weights"))
    weights: list[float] = []
    run = _run(weights)
    above = sum(weight > 1 for weight in weights)
    assert 0 < above < len(weights), f"the weights are all of one kind: {weights}"
    result = run.result
    result.outcome = dpo_steps.judged_steps(run)
    acted = tiny.acts(ID, TARGET, run.trainer)
    hit = sum(
        abs(micro_batch.expected["right"] - micro_batch.expected["wrong"]) > 1e-6 for micro_batch in run.micro_batches
    )
    assert acted in (None, hit), f"the wrapper acts in {acted} of {hit} micro-batches"
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with weights up to 1, of a model that is surer of other tokens, and without weights."""
    weights: list[float] = []
    runs = {"below 1": _run(weights, make=tiny.llama), "none": _run([], use_weighting=False)}
    assert max(weights) < 1, weights
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {name}"
    return dpo_steps.several_runs(runs, absent("no pair weighs more than 1"))


def _unsure(folder: str, seed: int) -> Any:
    """Return a model that finds all tokens nearly as likely: the weights of some pairs are above 1."""
    import torch

    model = tiny.llama(folder, seed=seed)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.2)
    return model


def _run(weights: list[float], *, make: Any = _unsure, **settings: Any) -> tiny.FormulaSteps:
    """Train, and append the weights of all pairs to ``weights``."""

    def formula(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:]
        logits = policy(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.gather(2, ids[:, 1:, None])[..., 0]
        chosen, rejected = (tokens * mask).sum(1).chunk(2)
        of_reference = tiny.preference_log_probs(reference, batch)
        aligned = ((tokens - (2 * log_probs).logsumexp(-1)) * mask).sum(1) / mask.sum(1)
        weight = sum(aligned.detach().chunk(2)).exp()
        weights.extend(weight.tolist())
        margins = chosen - rejected - (of_reference[0] - of_reference[1])
        of_pair = -torch.nn.functional.logsigmoid(dpo_steps.BETA * margins)
        return {"right": (of_pair * weight.clamp(max=1)).mean(), "wrong": (of_pair * weight).mean()}

    # Releases may load the reference from the policy's folder, where the model is as it was made.
    return dpo_steps.dpo_steps(formula, make, reference=1, **{"use_weighting": True, **settings})
