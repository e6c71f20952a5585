"""The proof: one step of the real GRPO and RLOO trainers on a model whose turns end with a token of their own.

The model ends a completion after five tokens, and goes on to eight unless its ``generation_config`` says that it may
stop there. What is trained on are five tokens, with ``mask_truncated_completions`` and without.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True

END_OF_TURN = 9


def one_step(method: str, *, ends: list[int], **settings: Any) -> dict[str, Any]:
    """How many tokens of each completion are trained on, the loss and the gradients. The model lists ``ends``."""
    import torch
    import trl

    seen: dict[str, Any] = {}

    class Measured(getattr(trl, f"{method}Trainer")):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            seen.setdefault("loss", float(loss.detach()))
            seen.setdefault("lengths", inputs["completion_mask"].sum(1).tolist())
            return loss

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        said = generation_config.eos_token_id
        stops = END_OF_TURN in (said if isinstance(said, list) else [said])
        rest = [0, 0, 0] if stops else [11, 12, 13]
        rows = [
            [*(20 + (7 * (row % 4) + 3 * place) % 40 for place in range(4)), END_OF_TURN]
            for row in range(len(input_ids))
        ]
        return torch.cat([input_ids, torch.tensor([[*row, *rest] for row in rows])], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        policy.generation_config.eos_token_id = ends
        wanted = {"num_iterations": 1, "beta": 0.0, **settings}
        trainer = tiny.grpo_of_one_length(Measured, policy, config_class=getattr(trl, f"{method}Config"), **wanted)
        policy.generate = generate
        step = tiny.FirstStep(trainer.model)
        trainer.train()
    return {**seen, "gradients": step.gradients}


def train() -> tiny.TrainingResult:
    import trl

    methods = [
        method
        for method in ("GRPO", "RLOO")
        if "_generate_and_score_completions" in vars(getattr(trl, f"{method}Trainer", object))
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release generates elsewhere"))
    runs = {method: one_step(method, ends=[1, END_OF_TURN]) for method in methods}
    outcome = judge(sum(sum(run["lengths"]) for run in runs.values()), right=20 * len(runs), wrong=32 * len(runs))
    if "mask_truncated_completions" in trl.GRPOConfig.__dataclass_fields__:
        for method in methods:
            masked = one_step(method, ends=[1, END_OF_TURN], mask_truncated_completions=True)["lengths"]
            if masked != ([5] * 4 if outcome.verdict.value == "fixed" else [0] * 4):
                raise AssertionError(f"{method}: with mask_truncated_completions, {masked} tokens are trained on")
    return tiny.TrainingResult(outcome, runs["GRPO"]["loss"], runs["GRPO"]["gradients"])


def unaffected() -> tiny.TrainingResult:
    """A model that lists no end but the tokenizer's."""
    seen = one_step("GRPO", ends=[1])
    return tiny.TrainingResult(absent("one end"), seen["loss"], seen["gradients"])
