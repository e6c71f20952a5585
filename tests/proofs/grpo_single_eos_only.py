"""The proof: one step of the real GRPO and RLOO trainers on a model whose turns end with a token of their own.

The model ends a completion after five tokens, and goes on to eight unless its ``generation_config`` lists that token
as an end. The loss must cover five tokens, with ``mask_truncated_completions`` and without.
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
    """Return how many tokens of each completion are trained on, the loss and the gradients.

    ``ends`` are the end-of-sequence tokens of the model's ``generation_config``.
    """
    import torch
    import trl

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        eos = generation_config.eos_token_id
        stops = END_OF_TURN in (eos if isinstance(eos, list) else [eos])
        continuation = [0, 0, 0] if stops else [11, 12, 13]
        rows = [
            [*(20 + (7 * (row % 4) + 3 * place) % 40 for place in range(4)), END_OF_TURN]
            for row in range(len(input_ids))
        ]
        return torch.cat([input_ids, torch.tensor([[*row, *continuation] for row in rows])], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        policy.generation_config.eos_token_id = ends
        trainer = tiny.grpo_of_one_length(
            tiny.measured(getattr(trl, f"{method}Trainer")),
            policy,
            config_class=getattr(trl, f"{method}Config"),
            **{"num_iterations": 1, "beta": 0.0, **settings},
        )
        policy.generate = generate
        trainer.train()
    lengths = trainer.batches[0]["completion_mask"].sum(1).tolist()
    return {"loss": trainer.losses[0], "lengths": lengths, "gradients": trainer.step.gradients}


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
    """Train a model that lists no end but the tokenizer's."""
    run = one_step("GRPO", ends=[1])
    return tiny.TrainingResult(absent("one end"), run["loss"], run["gradients"])
