"""Stand-ins for the Liger kernel, an optional package that the stacks lack.

What it puts into a model computes the same numbers as the model, so names alone are installed: what transformers asks
of it does nothing to the model. Its losses are computed in one piece here. ``tests/bench/test_liger.py`` compares them
with those of the package.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock


@contextmanager
def names_of_liger(*modules: str) -> Iterator[None]:
    """Have ``use_liger_kernel=True`` accepted inside the block by transformers, and by these modules of TRL."""
    kernel: Any = types.ModuleType("liger_kernel.transformers")
    kernel._apply_liger_kernel_to_instance = lambda **settings: None
    with ExitStack() as stack:
        # mock.patch.dict would take out what is imported inside the block, too.
        for name in (kernel.__name__.partition(".")[0], kernel.__name__):
            sys.modules[name] = kernel
            stack.callback(sys.modules.pop, name)
        for module in (*modules, "transformers.trainer", "transformers.integrations.liger"):
            with suppress(ImportError):  # the last one is a part of later releases of transformers
                if hasattr(importlib.import_module(module), "is_liger_kernel_available"):
                    stack.enter_context(mock.patch(f"{module}.is_liger_kernel_available", return_value=True))
        yield


def _log_probs(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
    """Return the sum of the log-probs of the labels of each row, and all logits."""
    logits = hidden @ weight.t()
    mask = labels != -100
    of_labels = logits.log_softmax(-1).gather(-1, labels.masked_fill(~mask, 0)[..., None])[..., 0]
    return (of_labels * mask).sum(-1), logits


def dpo_loss(
    beta: float,
    lin_weight: Any,
    _input: Any,
    target: Any,
    bias: Any = None,
    ref_input: Any = None,
    ref_weight: Any = None,
    ref_bias: Any = None,
) -> Any:
    """Return what ``LigerFusedLinearDPOLoss`` returns, without biases. The first half of the rows are the chosen."""
    import torch

    chosen = len(target) // 2
    policy, logits = _log_probs(_input, lin_weight, target)
    with torch.no_grad():
        reference, _ = _log_probs(ref_input, ref_weight, target)
    rewards = beta * (policy - reference)
    loss = -torch.nn.functional.logsigmoid(rewards[:chosen] - rewards[chosen:]).mean()
    rewards, policy, logits = rewards.detach(), policy.detach(), logits.detach()
    means = (logits[:chosen].mean(), logits[chosen:].mean())
    return loss, (policy[:chosen], policy[chosen:], *means, torch.zeros(()), rewards[:chosen], rewards[chosen:])


def kto_loss(
    beta: float,
    _input: Any,
    lin_weight: Any,
    target: Any,
    bias: Any = None,
    preference_labels: Any = None,
    ref_input: Any = None,
    ref_weight: Any = None,
    ref_bias: Any = None,
    kl: Any = None,
) -> Any:
    """Return what ``LigerFusedLinearKTOLoss`` returns, without biases."""
    import torch

    policy, logits = _log_probs(_input, lin_weight, target)
    with torch.no_grad():
        reference, _ = _log_probs(ref_input, ref_weight, target)
    rewards = beta * (policy - reference)
    sign = torch.where(preference_labels, 1.0, -1.0)
    loss = (1 - torch.sigmoid(sign * (rewards - beta * kl))).mean()
    parts = (policy.detach(), logits.detach().sum((1, 2)), rewards.detach())
    return loss, tuple(part[mask].sum() for part in parts for mask in (preference_labels, ~preference_labels))


def grpo_loss(
    loss_type: str,
    *,
    _input: Any,
    lin_weight: Any,
    selected_token_ids: Any,
    attention_mask: Any,
    advantages: Any,
    bias: Any = None,
    old_per_token_logps: Any = None,
    ref_per_token_logps: Any = None,
    vllm_is_ratio: Any = None,
    num_items_in_batch: Any = None,
) -> Any:
    """Return what ``LigerFusedLinearGRPOLoss`` returns without a divergence (``beta=0``)."""
    import torch

    log_probs = (_input @ lin_weight.T).log_softmax(-1).gather(-1, selected_token_ids[..., None])[..., 0]
    old = log_probs.detach() if old_per_token_logps is None else old_per_token_logps
    ratio = torch.exp(log_probs - old)
    advantages = advantages[:, None]
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    tokens = attention_mask.sum() if loss_type == "bnpo" or num_items_in_batch is None else num_items_in_batch
    return (losses * attention_mask).sum() / tokens.float().clamp(min=1), [torch.zeros(())]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Have the package's losses inside the block, and no kernels of its own in models: those are in Triton."""
    kernels: Any = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda **settings: None
    sys.modules[kernels.__name__] = kernels
    try:
        yield
    finally:
        del sys.modules[kernels.__name__]
