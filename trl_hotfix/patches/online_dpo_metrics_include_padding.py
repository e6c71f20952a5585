"""Online DPO sums the KL, the entropy and the rewards that it logs over the padding of the completions too.

``training_step`` masks the log-probs of the padding where it computes the loss, and then logs ``objective/kl``,
``objective/entropy``, ``objective/non_score_reward`` and ``objective/rlhf_reward`` of the log-probs as they came, of
shape ``(2 * prompts, completion length)``. What a model thinks of padding after the end of sequence is arbitrary, and
how much of it there is depends on the longest completion in the batch: the numbers by which a run is watched are
those of neither the policy nor the batch.

``_forward`` gives the log-probs of both models. Those of the padding are 0 here, which is what the loss multiplies them
by anyway, so that loss and gradient stay what they are bit by bit. Up to 0.13.0 there is no ``_forward``, and all is
done in one long method: these releases are left as they are. XPO and Nash-MD mask theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge
from ..model import Outcome
from ..stubs import absent_if_reexported, online_dpo_stub


def leave_out_the_padding(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have ``_forward`` give a log-prob of 0 for what is padding."""
    mask = argument(wrapped, args, kwargs, "completion_mask")
    return wrapped(*args, **kwargs).masked_fill(mask == 0, 0.0)


def metrics_are_those_of_the_tokens(module: ModuleType) -> Outcome:
    """The KL and the entropy of two completions of three and of two tokens, and the loss, which stays."""
    import torch

    if elsewhere := absent_if_reexported(module, module.OnlineDPOTrainer._forward):
        return elsewhere
    completions, mask = torch.tensor([[1, 2, 0], [5, 0, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    trainer = online_dpo_stub(module, completions, mask)
    trainer.training_step(trainer.model, {"prompt": ["a"]}, None)

    # The last word of the prompt is 8.
    before = torch.cat([torch.full((2, 1), 8), completions[:, :-1]], dim=1)
    policy, reference = (
        each.weight.detach()[before].log_softmax(-1).gather(2, completions[..., None])[..., 0]
        for each in (trainer.model, trainer.ref_model)
    )
    logged = {name: trainer.stats[f"objective/{name}"][-1] for name in ("kl", "entropy", "non_score_reward")}

    def over(counted: Any) -> dict[str, float]:
        kl = float(((policy - reference) * counted).sum(1).mean())
        return {"kl": kl, "entropy": float(-(policy * counted).sum(1).mean()), "non_score_reward": -0.1 * kl}

    right, wrong = over(mask), over(torch.ones_like(mask))
    verdicts = {name: judge(each, right=right[name], wrong=wrong[name]) for name, each in logged.items()}
    if len({each.verdict for each in verdicts.values()}) > 1:
        raise AssertionError(f"the metrics do not agree: {verdicts}")
    margin = ((policy - reference) * mask).sum(1)
    loss, expected = trainer.went_backward[0], -torch.nn.functional.logsigmoid(0.1 * (margin[0] - margin[1]))
    if not torch.allclose(loss.detach(), expected):
        raise AssertionError(f"the loss is {loss}, and not {expected}")
    return verdicts["kl"]
