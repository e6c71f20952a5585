"""Train two steps of two micro-batches with the real GRPOTrainer, and evaluate: all weights, and an adapter.

Losses, accumulated gradients and the ``kl`` metric are compared with the paper (arXiv:2402.03300, equations 3 and 4).
All completions are equally long, so that the mean over sequences is the mean over tokens, which 0.16.0 takes.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import grpo_log_probs, grpo_steps
from tiny.grpo_log_probs import LENGTH

OVERLAYS = ()
PARITY = True

ID = "grpo-temperature-not-applied"


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not Version("0.14") <= Version(trl.__version__) < Version("0.17"):
        return tiny.TrainingResult(absent("it has no GRPO, or divides the logits since 0.16.0"))
    return grpo_log_probs.judged_runs({"full": _run(0.5), "adapter": _run(0.7, tiny.lora())})


def unaffected() -> tiny.TrainingResult:
    """Train at temperature 1, without one, and at 0, where nothing is divided."""
    runs = {str(temperature): _run(temperature) for temperature in (1.0, None, 0.0)}
    for name, run in runs.items():
        for target in ("compute_loss", "_get_per_token_logps"):
            if tiny.acts(ID, f"trl.trainer.grpo_trainer:GRPOTrainer.{target}", run.trainer):
                raise AssertionError(f"the wrapper acts at temperature {name}")
    return grpo_steps.several_runs(runs, absent("nothing is divided"))


def _run(temperature: float | None, peft_config: Any = None) -> tiny.FormulaSteps:
    """Train and evaluate. Each micro-batch has other completions than the one before."""
    from trl import GRPOTrainer

    def drawn(sequences: Any, number: int) -> Any:
        sequences[:, -LENGTH:-1] += number % 4
        return sequences

    def log_probs(model: Any, sequences: Any, number: int) -> dict[str, Any]:
        logits = model(input_ids=sequences, use_cache=False).logits[:, -LENGTH - 1 : -1]
        divided = {"right": logits / (temperature or 1.0), "wrong": logits}
        tokens = sequences[:, -LENGTH:, None]
        return {name: value.log_softmax(-1).gather(-1, tokens)[..., 0] for name, value in divided.items()}

    return grpo_log_probs.recorded_steps(
        GRPOTrainer, drawn, log_probs, peft_config, evaluates=True, temperature=temperature
    )
