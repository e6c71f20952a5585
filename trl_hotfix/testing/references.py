"""GRPO of 0.14 and 0.15 generates for a policy, and computes its loss with the log-probs of policy and reference.

0.14.0 does both in ``compute_loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .generation import stub_that_scores
from .models import wrapped_like_deepspeed


def stub_with_reference(
    module: ModuleType,
    policy: Any,
    reference: Any,
    generate: Callable[..., Any],
    rewards: Sequence[float],
    *,
    has_adapter: bool = False,
    **settings: Any,
) -> Any:
    """Return a stub of ``stub_that_scores`` whose completions ``generate`` makes.

    ``policy`` and ``reference`` are models of one ``weight``. With an adapter the policy is wrapped, and is its own
    reference: without the adapter it has the weight of ``reference``.
    """
    model = wrapped_like_deepspeed(policy) if has_adapter else policy
    trainer = stub_that_scores(module, [()] * len(rewards), rewards, model=model, reference=reference, **settings)
    policy.generate = generate
    if has_adapter:
        trainer.ref_model = None
        policy.disable_adapter = lambda: _with_weight_of(reference, policy)
        trainer.accelerator.unwrap_model = lambda model, *args, **kwargs: model.module
    return trainer


@contextmanager
def _with_weight_of(reference: Any, policy: Any) -> Iterator[None]:
    weight, policy.weight.data = policy.weight.data, reference.weight.data
    try:
        yield
    finally:
        policy.weight.data = weight


def token_losses_of_a_group(policy: Any, reference: Any, rewards: Any, beta: float) -> Any:
    """Return the loss of each token by DeepSeekMath (arXiv:2402.03300), equations 3 and 4, from the log-probs of both.

    They are of shape ``(completions, tokens)``, and ``rewards`` has one for each completion, all of one prompt. The
    policy is the one that has drawn them, so that nothing is clipped.
    """
    import torch

    log_ratio = reference.detach() - policy
    kl = torch.exp(log_ratio) - log_ratio - 1
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return beta * kl - torch.exp(policy - policy.detach()) * advantages[:, None]
