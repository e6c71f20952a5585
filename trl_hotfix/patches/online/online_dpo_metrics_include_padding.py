"""Online DPO logs KL, entropy and rewards that are summed over the padding of the completions too.

``training_step`` masks the log-probs of the padding where it computes the loss, but it computes ``objective/kl``,
``objective/entropy``, ``objective/non_score_reward`` and ``objective/rlhf_reward`` from the unmasked log-probs, of
shape ``(2 * prompts, completion length)``.

``_forward`` returns the log-probs of the policy and of the reference, so it is the only place to change.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, online_dpo_stub


@wrapper
def leave_out_the_padding(call: Call) -> Any:
    """Set the log-probs of the padding that ``_forward`` returns to 0."""
    mask = call["completion_mask"]
    return call().masked_fill(mask == 0, 0.0)


def metrics_are_those_of_the_tokens(module: ModuleType) -> Outcome:
    """Compare the KL that a step logs with the sums over the tokens, and over the padding too."""
    import torch

    if reexported := absent_if_reexported(module, module.OnlineDPOTrainer._forward):
        return reexported
    completions, mask = torch.tensor([[1, 2, 0], [5, 0, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    trainer = online_dpo_stub(module, completions, mask)
    trainer.training_step(trainer.model, {"prompt": ["a"]}, None)
    # The last token of the prompt is 8.
    previous_tokens = torch.cat([torch.full((2, 1), 8), completions[:, :-1]], dim=1)
    policy, reference = (
        model.weight[previous_tokens].log_softmax(-1).gather(2, completions[..., None])[..., 0]
        for model in (trainer.model, trainer.ref_model)
    )
    right, wrong = (
        float(((policy - reference) * positions).sum(1).mean()) for positions in (mask, torch.ones_like(mask))
    )
    return judge(trainer.stats["objective/kl"][0], right=right, wrong=wrong)
