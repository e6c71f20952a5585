"""Train two optimizer steps of two micro-batches with the real GRPOTrainer and CISPO, and evaluate.

Losses and accumulated gradients are compared with CISPO (arXiv:2506.13585, equation 4): each log-prob times its
advantage and its ratio, which is no constant in the second step, where the policy is not the one that generated.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent, shadowed
from trl_hotfix.model import Verdict

import tiny
from tiny import grpo_steps

ID, TARGET = "grpo-cispo-epsilon-high-default", "trl.trainer.grpo_trainer:GRPOTrainer.__init__"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the matrix A of a new adapter has no gradient in the first step, and the proof asks for one"}

TOKENS = sum(tiny.grpo_runs.COMPLETION_LENGTHS)


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    if "cispo" not in str(GRPOConfig.__dataclass_fields__.get("loss_type")):
        return tiny.TrainingResult(absent("this release has no CISPO"))
    run = _run()
    result = run.result
    result.outcome = grpo_steps.judged_steps(run)
    is_patched = result.outcome.verdict is Verdict.FIXED
    acted = tiny.acts(ID, TARGET, run.trainer)
    assert acted in (None, 1), f"the wrapper acts {acted} times"
    assert run.trainer.args.epsilon_high == (5.0 if is_patched else None)
    clipped = [entry["cispo_clip_ratio"] for entry in run.trainer.state.log_history if "cispo_clip_ratio" in entry]
    assert clipped, "no cispo_clip_ratio is logged"
    assert all((ratio == 0) is is_patched for ratio in clipped), clipped
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with a cap of the user, with an ``epsilon`` that can be one, and with the default loss."""
    runs = {
        "a cap": _run(epsilon_high=5.0),
        "a low cap": _run(epsilon_high=0.28),
        "an epsilon": _run(epsilon=2.0),
        "dapo": _run(loss_type="dapo"),
    }
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {name}"
    return grpo_steps.several_runs(runs, absent("the cap is no epsilon"))


def _run(**settings: Any) -> Any:
    def formula(trainer: Any, inputs: Any, token_loss: Any, mask: Any) -> dict[str, Any]:
        log_probs = grpo_steps.log_probs_of(trainer.model, inputs)
        old = inputs.get("old_per_token_logps")
        ratio = (log_probs - (log_probs if old is None else old)).detach().exp()
        # A generation is that of an optimizer step, and an evaluation accumulates nothing.
        tokens = TOKENS * (2 if trainer.model.training else 1)
        values = -inputs["advantages"].unsqueeze(1) * log_probs * mask / tokens
        return {"right": (values * ratio).sum(), "wrong": (values * ratio.clamp(max=0.2)).sum()}

    make = grpo_steps.grpo
    trainers = []

    def grpo(*args: Any, **kwargs: Any) -> Any:
        trainers.append(make(*args, **kwargs))
        return trainers[-1]

    with shadowed(grpo_steps, "grpo", grpo):
        run: Any = grpo_steps.grpo_steps(
            formula, **{"loss_type": "cispo", "num_iterations": 2, "beta": 0.0, **settings}
        )
    (run.trainer,) = trainers
    return run
