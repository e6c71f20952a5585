"""DPO unpacks the six values of the reference's forward into five names.

With ``output_router_logits=True``, ``concatenated_forward`` returns six values, the auxiliary loss last. For the policy
``get_batch_loss_metrics`` takes the first five and then the sixth. The reference's are unpacked into five names, there
and in ``compute_reference_log_probs``. TRL 0.11.0 takes the values that it needs (pull request 2039). The repair lets
the calls for the reference return five values.

As soon as the step runs, these releases also read the coefficient from the wrapped model, so that under DeepSpeed it
would be 0 (see ``moe_aux_loss_lost_under_deepspeed``). Therefore ``get_batch_loss_metrics`` is given the plain model's
config too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import act_of_this_call, judge, with_coefficient_of_plain_model
from ..model import Outcome, Verdict
from ..testing import dpo_stub, tiny_causal_lm, wrapped_like_deepspeed


def unpack_reference_of_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``get_batch_loss_metrics`` six values of the policy, which it calls first, and five of the reference."""
    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)
    with _five_values(instance, after=1):
        return wrapped(*args, **kwargs)


def unpack_reference(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give ``compute_reference_log_probs``, which calls the reference only, five values."""
    with _five_values(instance, after=0):
        return wrapped(*args, **kwargs)


@contextmanager
def _five_values(trainer: Any, *, after: int) -> Iterator[None]:
    """Let all calls of ``trainer.concatenated_forward`` but the first ``after`` return five values."""
    act = act_of_this_call()
    forward = trainer.concatenated_forward
    calls = 0

    def five(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        values = forward(*args, **kwargs)
        if calls > after and len(values) > 5:
            act()
        return values if calls <= after else values[:5]

    attributes = vars(trainer)
    before = {name: value for name, value in attributes.items() if name == "concatenated_forward"}
    trainer.concatenated_forward = five
    try:
        yield
    finally:
        del trainer.concatenated_forward
        attributes.update(before)


def loss_and_reference_are_computed(module: ModuleType) -> Outcome:
    """Check that the loss is that without the auxiliary loss, plus coefficient * aux_loss.

    The reference's log-probs must be those without the auxiliary loss.
    """
    import torch

    coefficient, aux_loss = 0.5, 2.0
    config = SimpleNamespace(router_aux_loss_coef=coefficient, output_router_logits=True, model_type="tiny")
    model = tiny_causal_lm(config, aux_loss=aux_loss)
    trainer = dpo_stub(module, model=model, ref_model=tiny_causal_lm(config, aux_loss=7.0))
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    batch = {}
    for side, ids in {"prompt": tokens[:, :2], "chosen": tokens, "rejected": tokens.flip(1)}.items():
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = torch.ones_like(ids)
        batch[f"{side}_labels"] = ids.clone()

    def loss_through(model: Any, *, enabled: bool) -> float:
        trainer.aux_loss_enabled = enabled
        loss, _ = trainer.get_batch_loss_metrics(model, batch)
        return float(loss.detach())

    def reference(*, enabled: bool) -> float:
        trainer.aux_loss_enabled = enabled
        chosen, rejected = trainer.compute_reference_log_probs(batch)
        return float(chosen.sum() + rejected.sum())

    without, log_probs = loss_through(model, enabled=False), reference(enabled=False)
    failures: dict[str, str] = {}
    answers: dict[str, float] = {}
    calls: dict[str, Callable[[], float]] = {
        "loss": lambda: loss_through(model, enabled=True),
        "reference": lambda: reference(enabled=True),
    }
    for name, call in calls.items():
        try:
            answers[name] = call()
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
            failures[name] = str(error)
    if len(failures) == len(calls):
        return Outcome(Verdict.REPRODUCED, {"error": failures["loss"]})
    if failures:
        raise AssertionError(f"one half fails only: {failures}")
    if answers["reference"] != log_probs:
        raise AssertionError(f"reference {answers['reference']!r}, without the auxiliary loss {log_probs!r}")
    right = without + coefficient * aux_loss
    # 0.11 loses the term of a wrapped model, which another patch repairs: the number is evidence and decides nothing.
    wrapped = loss_through(wrapped_like_deepspeed(model), enabled=True)
    return judge(answers["loss"], right=right, wrong=without, wrapped=wrapped, reference=log_probs)
