"""The proof: two steps of two micro-batches of the real OnlineDPOTrainer, on completions of unequal length.

The logged metrics are compared with the log-probs of the same completions, computed without TRL, and the accumulated
gradients with those of the loss of the tokens, patched or not.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "change detached": "the loss multiplies the log-probs of the padding by 0, so their gradient is 0 in any case",
    "applied twice": "what is 0 is set to 0 again",
}

BETA = 0.5
MICRO_BATCHES = 2


def train() -> tiny.TrainingResult:
    return _train(padded=True)


def unaffected() -> tiny.TrainingResult:
    """Train on completions of one length: there is no padding."""
    return _train(padded=False)


def _train(*, padded: bool) -> tiny.TrainingResult:
    import torch

    trainer_class, config_class = tiny.classes("OnlineDPO")
    if not hasattr(trainer_class, "_forward"):
        return tiny.TrainingResult(absent("there is no _forward: all is done in one method"))
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    measured: list[float] = []
    right: list[float] = []
    wrong: list[float] = []
    by_formula: dict[str, Any] = {}

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            number = len(losses)
            plain = self.model
            weights = {name: weight for name, weight in plain.named_parameters() if weight.requires_grad}
            if padded:
                self.expect(plain, weights, first=number % MICRO_BATCHES == 0)
                by_formula.update({f"{number}.{name}": gradient for name, gradient in self.summed.items()})
            loss = super().training_step(model, inputs, *args, **kwargs)
            losses.append(float(loss))
            gradients.update({f"{number}.{name}": weight.grad.clone() for name, weight in weights.items()})
            measured.extend(self.stats[f"objective/{name}"][-1] for name in ("kl", "entropy", "non_score_reward"))
            return loss

        def expect(self, plain: Any, weights: dict[str, Any], *, first: bool) -> None:
            """Note the metrics of this micro-batch, and the sum of the gradients of the step so far."""
            for values, padding in ((right, False), (wrong, True)):
                with torch.no_grad():
                    reference = tiny.online_log_probs(untrained, 4, padding=padding)
                policy = tiny.online_log_probs(plain, 4, padding=padding)
                margins = (policy - reference).sum(1)
                values += [float(margins.mean()), -float(policy.sum(1).mean()), -BETA * float(margins.mean())]
                if not padding:
                    loss = -torch.nn.functional.logsigmoid(BETA * (margins[:2] - margins[2:])).mean()
                    new = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
            self.summed = new if first else {name: self.summed[name] + gradient for name, gradient in new.items()}

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[10 + (11 * row + 3 * place) % 50 for place in range(5)] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy, untrained = (tiny.llama(folder, seed=0) for _ in range(2))
        settings = {"beta": BETA, "gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2, "learning_rate": 1e-2}
        trainer = tiny.online_dpo(Recorder, config_class, policy, **settings)
        if not padded:
            policy.generate = generate
        trainer.train()
    if not padded:
        return tiny.TrainingResult(absent("there is no padding"), sum(losses), gradients)
    off = min(max(abs(one - other) for one, other in zip(measured, values, strict=True)) for values in (right, wrong))
    # Some releases do not divide the loss by the micro-batches, which is a bug of its own.
    gradients_off = min(
        max(float((gradient - scale * by_formula[name]).abs().max()) for name, gradient in gradients.items())
        for scale in (1.0, 1 / MICRO_BATCHES)
    )
    if len(losses) != 4 or off > 1e-4 or gradients_off > 1e-5:
        raise AssertionError(f"{len(losses)} losses; metrics are off by {off}, gradients by {gradients_off}")
    return tiny.TrainingResult(judge(sum(measured), right=sum(right), wrong=sum(wrong)), losses[0], gradients)
