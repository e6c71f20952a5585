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

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import shadowed, with_coefficient_of_plain_model
from ...model import Outcome, Verdict
from ...testing import (
    dpo_stub,
    judge_with_gradients,
    pair_batch,
    pair_micro_batches,
    tiny_moe_lm,
    wrapped_like_deepspeed,
)

_CRASH = "too many values to unpack"
_COEFFICIENT = 0.5  # of the self-test


def unpack_reference_of_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``get_batch_loss_metrics`` six values of the policy, which it calls first, and five of the reference."""
    if not instance.aux_loss_enabled:
        return wrapped(*args, **kwargs)
    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)
    with _five_values(instance, after=1):
        return wrapped(*args, **kwargs)


def unpack_reference(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give ``compute_reference_log_probs``, which calls the reference only, five values."""
    if not instance.aux_loss_enabled:
        return wrapped(*args, **kwargs)
    with _five_values(instance, after=0):
        return wrapped(*args, **kwargs)


def _five_values(trainer: Any, after: int) -> AbstractContextManager[None]:
    """Let all calls of ``trainer.concatenated_forward`` but the first ``after`` return five values."""
    forward = trainer.concatenated_forward
    calls = itertools.count()

    def five(*args: Any, **kwargs: Any) -> Any:
        values = forward(*args, **kwargs)
        return values if next(calls) < after else values[:5]

    return shadowed(trainer, "concatenated_forward", five)


def loss_and_reference_are_computed(module: ModuleType) -> Outcome:
    """Check the losses of two steps and of an evaluation, with their gradients, and the log-probs of the reference.

    The loss is that without the auxiliary loss, plus coefficient * aux_loss of the policy. The reference is as without
    the auxiliary loss.
    """
    config = SimpleNamespace(router_aux_loss_coef=_COEFFICIENT, output_router_logits=True, model_type="tiny")
    model, reference = tiny_moe_lm(config), tiny_moe_lm(config, router=3.0)
    trainers = [dpo_stub(module, model=model, ref_model=reference, state=SimpleNamespace()) for _ in range(2)]
    calls = [*_calls_of_loss(module, *trainers), *_calls_of_reference(module, *trainers)]
    results, failures = [], []
    for call in calls:
        try:
            results.append(call())
        except ValueError as error:
            if _CRASH not in str(error):
                raise
            failures.append(str(error))
    if len(failures) == len(calls):
        return Outcome(Verdict.REPRODUCED, {"error": failures[0]})
    if failures:
        raise AssertionError(f"{len(failures)} of {len(calls)} calls fail: {failures[0]}")
    if any("concatenated_forward" in vars(trainer) for trainer in trainers):
        raise AssertionError("the trainer's forward is not its own any more")
    return judge_with_gradients([model.weight, model.router], filter(None, results))


def _calls_of_loss(module: ModuleType, training: Any, evaluating: Any) -> Iterator[Callable[[], Any]]:
    """Give a call for each micro-batch, which returns the loss as it is measured, right and wrong.

    One trainer trains, another evaluates.
    """
    policies = [training.model]
    # 0.11 unpacks no names that it does not use. It loses the term of a wrapped model, which another patch repairs.
    if "_" in inspect.unwrap(module.DPOTrainer.compute_reference_log_probs).__code__.co_varnames:
        policies.append(wrapped_like_deepspeed(training.model))

    def call(policy: Any, micro_batch: Any) -> tuple[Any, Any, Any]:
        trainer = training if micro_batch.is_training else evaluating
        trainer.state.global_step = micro_batch.step
        trainer.model.train(micro_batch.is_training)
        batch = pair_batch(module, micro_batch.pairs)
        mode = "train" if micro_batch.is_training else "eval"
        trainer.aux_loss_enabled = False
        without, _ = trainer.get_batch_loss_metrics(policy, batch, train_eval=mode)
        trainer.aux_loss_enabled = True
        trainer.model.aux_losses.clear()
        measured, _ = trainer.get_batch_loss_metrics(policy, batch, train_eval=mode)
        (aux_loss,) = trainer.model.aux_losses
        return measured, without + _COEFFICIENT * aux_loss, without

    for policy in policies:
        for micro_batch in pair_micro_batches():
            yield functools.partial(call, policy, micro_batch)


def _calls_of_reference(module: ModuleType, training: Any, evaluating: Any) -> Iterator[Callable[[], Any]]:
    """Give a call for each micro-batch, which checks the log-probs of the reference."""
    import torch

    def call(micro_batch: Any) -> None:
        trainer = training if micro_batch.is_training else evaluating
        batch = pair_batch(module, micro_batch.pairs)
        trainer.state.global_step = micro_batch.step
        trainer.model.train(micro_batch.is_training)
        trainer.aux_loss_enabled = False
        right = torch.cat(trainer.compute_reference_log_probs(batch))
        trainer.aux_loss_enabled = True
        measured = torch.cat(trainer.compute_reference_log_probs(batch))
        if not torch.equal(measured, right):
            raise AssertionError(f"the reference is {measured}, and without the auxiliary loss {right}")

    for micro_batch in pair_micro_batches():
        yield functools.partial(call, micro_batch)
