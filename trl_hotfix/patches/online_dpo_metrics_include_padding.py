"""Online DPO logs KL, entropy and rewards that are summed over the padding of the completions too.

``training_step`` masks the log-probs of the padding where it computes the loss, but it computes ``objective/kl``,
``objective/entropy``, ``objective/non_score_reward`` and ``objective/rlhf_reward`` from the unmasked log-probs, of
shape ``(2 * prompts, completion length)``.

``_forward`` returns the log-probs of the policy and of the reference, so it is the only place to change.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..authoring import Call, judge, wrapper
from ..model import Outcome
from ..testing import absent_if_reexported, online_dpo_stub

_METRICS = ("kl", "entropy", "non_score_reward")


@wrapper
def leave_out_the_padding(call: Call) -> Any:
    """Set the log-probs of the padding that ``_forward`` returns to 0."""
    mask = call["completion_mask"]
    return call().masked_fill(mask == 0, 0.0)


def metrics_are_those_of_the_tokens(module: ModuleType) -> Outcome:
    """Check the metrics of each micro-batch of two runs, and that loss and gradient are those of the tokens anyway."""
    import torch

    if reexported := absent_if_reexported(module, module.OnlineDPOTrainer._forward):
        return reexported
    # The first half of the rows has the better completions.
    runs = (
        ([[1, 2, 0], [5, 0, 9]], [[1, 1, 1], [1, 1, 0]]),
        ([[4, 0, 9, 9], [3, 3, 6, 0], [2, 7, 0, 9], [6, 5, 1, 4]], [[1, 1, 0, 0], [1] * 4, [1, 1, 1, 0], [1] * 4]),
    )
    measured: list[float] = []
    right: list[float] = []
    wrong: list[float] = []
    for rows, mask_rows in runs:
        completions, mask = torch.tensor(rows), torch.tensor(mask_rows)
        trainer = online_dpo_stub(module, completions, mask)
        prompts = len(rows) // 2
        # The last token of the prompt is 8.
        previous_tokens = torch.cat([torch.full((len(rows), 1), 8), completions[:, :-1]], dim=1)
        policy, reference = (
            model.weight[previous_tokens].log_softmax(-1).gather(2, completions[..., None])[..., 0]
            for model in (trainer.model, trainer.ref_model)
        )
        margins = ((policy - reference.detach()) * mask).sum(1)
        expected_loss = -torch.nn.functional.logsigmoid(0.1 * (margins[:prompts] - margins[prompts:])).mean()
        (expected_gradient,) = torch.autograd.grad(expected_loss, [trainer.model.weight], retain_graph=True)
        for step in (0, 0, 1):
            trainer.state.global_step = step
            trainer.training_step(trainer.model, {"prompt": ["a"] * prompts}, None)
            loss = trainer.went_backward[-1]
            (gradient,) = torch.autograd.grad(loss, [trainer.model.weight])
            if not torch.allclose(loss, expected_loss) or not torch.allclose(gradient, expected_gradient, atol=1e-6):
                raise AssertionError(f"the loss is {loss}, and not {expected_loss}, or its gradient is another")
        measured += [value for name in _METRICS for value in trainer.stats[f"objective/{name}"]]
        for values, positions in ((right, mask), (wrong, torch.ones_like(mask))):
            kl = float(((policy - reference) * positions).sum(1).mean())
            metrics = (kl, float(-(policy * positions).sum(1).mean()), -0.1 * kl)
            values += [metric for metric in metrics for _ in range(3)]
    off = min(max(abs(one - other) for one, other in zip(measured, values, strict=True)) for values in (right, wrong))
    if off > 1e-5:
        raise AssertionError(f"the metrics are {measured}: neither {right} nor {wrong}")
    return judge(measured[0], right=right[0], wrong=wrong[0], metrics=len(measured))
