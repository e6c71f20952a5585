"""Online DPO logs KL, entropy and rewards that are summed over the padding of the completions too.

``training_step`` masks the log-probs of the padding where it computes the loss, but it computes ``objective/kl``,
``objective/entropy``, ``objective/non_score_reward`` and ``objective/rlhf_reward`` from the unmasked log-probs, of
shape ``(2 * prompts, completion length)``.

``_forward`` returns the log-probs of the policy and of the reference, so it is the only place to change.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge
from ..model import Outcome
from ..testing import absent_if_reexported, online_dpo_stub


def leave_out_the_padding(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Set the log-probs of the padding that ``_forward`` returns to 0."""
    mask = argument(wrapped, args, kwargs, "completion_mask")
    return wrapped(*args, **kwargs).masked_fill(mask == 0, 0.0)


def metrics_are_those_of_the_tokens(module: ModuleType) -> Outcome:
    """Check the metrics of two completions, of three and of two tokens, and that their loss does not change."""
    import torch

    if reexported := absent_if_reexported(module, module.OnlineDPOTrainer._forward):
        return reexported
    completions, mask = torch.tensor([[1, 2, 0], [5, 0, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    trainer = online_dpo_stub(module, completions, mask)
    trainer.training_step(trainer.model, {"prompt": ["a"]}, None)

    # The last token of the prompt is 8.
    previous_tokens = torch.cat([torch.full((2, 1), 8), completions[:, :-1]], dim=1)
    policy, reference = (
        model.weight.detach()[previous_tokens].log_softmax(-1).gather(2, completions[..., None])[..., 0]
        for model in (trainer.model, trainer.ref_model)
    )
    logged = {name: trainer.stats[f"objective/{name}"][-1] for name in ("kl", "entropy", "non_score_reward")}

    def metrics_over(positions: Any) -> dict[str, float]:
        kl = float(((policy - reference) * positions).sum(1).mean())
        return {"kl": kl, "entropy": float(-(policy * positions).sum(1).mean()), "non_score_reward": -0.1 * kl}

    right, wrong = metrics_over(mask), metrics_over(torch.ones_like(mask))
    outcomes = {name: judge(value, right=right[name], wrong=wrong[name]) for name, value in logged.items()}
    if len({outcome.verdict for outcome in outcomes.values()}) > 1:
        raise AssertionError(f"the metrics do not agree: {outcomes}")
    margin = ((policy - reference) * mask).sum(1)
    loss, expected = trainer.went_backward[0], -torch.nn.functional.logsigmoid(0.1 * (margin[0] - margin[1]))
    if not torch.allclose(loss.detach(), expected):
        raise AssertionError(f"the loss is {loss}, and not {expected}")
    return outcomes["kl"]
