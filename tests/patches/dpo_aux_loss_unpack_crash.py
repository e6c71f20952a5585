"""The proof: one step of a tiny Mixtral with the real DPOTrainer: as it is, with precomputed reference log-probs, and,
in the releases that have the bug, under a real DeepSpeed engine.

Policy and reference have the same weights, so that the DPO loss of the first step is log 2, and what is over is the
auxiliary term.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

from trl_hotfix.authoring import judge
from trl_hotfix.model import Outcome, Verdict

import tiny

COEFFICIENT = 0.5
OVERLAYS = ("deepspeed",)
PARITY = True


def train() -> tiny.Seen:
    import trl
    from packaging.version import Version

    seen = {"plain": _train(), "precomputed": _train(precompute_ref_log_probs=True)}
    verdicts = [each.outcome.verdict for each in seen.values()]
    if verdicts == [Verdict.REPRODUCED] * 2:
        return seen["plain"]
    if verdicts != [Verdict.FIXED] * 2:
        raise AssertionError(f"they do not agree: {seen}")
    gradients = {f"{run}.{name}": each for run, it in seen.items() for name, each in it.gradients.items()}
    if Version(trl.__version__) < Version("0.11.0"):
        # Compared with the formula only: 0.11.0 has lost the term there.
        seen["DeepSpeed"] = _train(deepspeed=tiny.deepspeed(stage=0))
        if seen["DeepSpeed"].outcome.verdict is not Verdict.FIXED:
            raise AssertionError(f"under DeepSpeed: {seen['DeepSpeed'].outcome}")
    numbers = {run: each.outcome.to_dict() for run, each in seen.items()}
    return tiny.Seen(Outcome(Verdict.FIXED, numbers), seen["plain"].loss, gradients)


def _train(**settings: Any) -> tiny.Seen:
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Measured(tiny.one_group(DPOTrainer)):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    tokenizer = tiny.tokenizer()
    # 0.9.6 needs one and puts it at the beginning, later releases if it is not there yet.
    tokenizer.bos_token = tokenizer.eos_token
    wanted = {"max_length": 16, "max_prompt_length": 8, "router_aux_loss_coef": COEFFICIENT, **settings}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        seen = tiny.FirstStep(policy)
        trainer = tiny.trainer(
            Measured,
            model=policy,
            ref_model=reference,
            args=tiny.config(DPOConfig, **wanted),
            train_dataset=tiny.preferences().map(lambda row: {"prompt": f"{tokenizer.bos_token} {row['prompt']}"}),
            tokenizer=tokenizer,
        )
        try:
            trainer.train()
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
            return tiny.Seen(Outcome(Verdict.REPRODUCED, {"error": str(error)}))
    aux_loss = float(seen.outputs.aux_loss.detach())
    right = math.log(2) + COEFFICIENT * aux_loss
    outcome = judge(losses[0], right=right, wrong=math.log(2), coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.Seen(outcome, losses[0], seen.gradients)
