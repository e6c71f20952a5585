"""TRL 1.15.0 cannot take a training step where Triton does not run.

Tokens are scored by ``_ChunkedLogProbFunction``, a Triton kernel. Where Triton cannot be imported (macOS, Windows, a
build of torch for the CPU) that name is None. TRL 1.16.0 computes the same in torch there.

The repair gives the model a forward with the code of the one that ``add_fused_lm_head`` has given it, but with a
computation in torch under that name: the projection, ``logit_scale``, the soft cap and the temperature in the order of
TRL's kernel, in float32, for 1024 tokens at a time, recomputed in the backward pass.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import update_wrapper
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, module_of, shadowed, wrapper
from ...model import Outcome

_TOKENS = 1024
_NAME = "_ChunkedLogProbFunction"


@wrapper
def score_in_torch(call: Call) -> Any:
    """Give the model a forward that needs no Triton if Triton does not run."""
    result, module = call(), module_of(call)
    if getattr(module, _NAME) is not None and _triton_runs():
        return result
    call.act()
    model = call["model"]
    forward = model.forward.__func__
    # A patch that went on before may have put its own forward around TRL's, which it then closes over.
    around = [
        cell
        for cell in forward.__closure__ or ()
        if isinstance(cell.cell_contents, FunctionType) and cell.cell_contents.__globals__ is vars(module)
    ]
    for cell in around:
        cell.cell_contents = _in_torch(cell.cell_contents)
    if not around:
        model.forward = MethodType(_in_torch(forward), model)
    return result


def _in_torch(fused: FunctionType) -> FunctionType:
    """Return a copy of TRL's forward that scores in torch."""
    names = {**fused.__globals__, _NAME: _TorchLogProbFunction}
    forward = FunctionType(fused.__code__, names, fused.__name__, fused.__defaults__, fused.__closure__)
    forward.__kwdefaults__ = fused.__kwdefaults__
    # generate() reads the signature of the model's own forward, which TRL keeps in __wrapped__.
    update_wrapper(forward, fused.__wrapped__)  # type: ignore[attr-defined]
    return forward


def _triton_runs() -> bool:
    """Return whether there is a device for Triton's kernels, or its interpreter is asked for."""
    import torch

    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return os.environ.get("TRITON_INTERPRET") == "1" or any(
        device is not None and device.is_available() for device in devices
    )


class _TorchLogProbFunction:
    """Replace ``ChunkedLogProbFunction``. TRL calls its ``apply`` only."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1, each ``(tokens,)`` or None.

        ``hidden`` is ``(tokens, width)``, ``weight`` ``(vocabulary, width)`` and ``targets`` ``(tokens,)``. The last
        three results have no gradient.
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        def scored(hidden: Any, weight: Any, bias: Any, targets: Any) -> tuple[Any, ...]:
            # Under autocast torch computes this in its type.
            bias = None if bias is None else bias.to(hidden.dtype)
            logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
            if final_logit_softcapping is not None:
                logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
            logits = logits / temperature
            log_probs = logits.log_softmax(1)
            detached = log_probs.detach()
            return (
                -torch.nn.functional.nll_loss(log_probs, targets, reduction="none"),
                -(log_probs.exp() * log_probs).sum(1) if "entropy" in outputs else None,
                (2 * detached).logsumexp(1) if "log_sum_sq_probs" in outputs else None,
                logits.detach().mean(1) if "mean_logits" in outputs else None,
                detached.argmax(1) == targets if "is_top1" in outputs else None,
            )

        # split() makes one part of an empty batch too, so that a batch without labels has a gradient of 0.
        parts = [
            checkpoint(scored, states, weight, bias, labels, use_reentrant=False, preserve_rng_state=False)
            for states, labels in zip(hidden.split(_TOKENS), targets.split(_TOKENS), strict=True)
        ]
        return tuple(None if score[0] is None else torch.cat(score) for score in zip(*parts, strict=True))


def tokens_are_scored_without_triton(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of a token by its logit where Triton is missing: 1 - p, or 0 if that is a crash."""
    import torch

    weight, tokens = torch.arange(9.0).cos().reshape(3, 3).requires_grad_(), torch.tensor([[0, 1]])
    config = SimpleNamespace()
    config.get_text_config = lambda: config

    class Model:
        def base_model(self, input_ids: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(last_hidden_state=torch.eye(3)[input_ids])

        def get_output_embeddings(self) -> Any:
            return SimpleNamespace(weight=weight, bias=None)

        def forward(self, input_ids: Any) -> None:
            """Have a signature."""

    model: Any = Model()
    model.config = config
    right = 1 - weight[:, 0].softmax(0)[1].item()
    # From 1.16.0 on the kernel is a function in torch there.
    with nullcontext() if hasattr(module, "_use_triton") else shadowed(module, _NAME, None):
        module.add_fused_lm_head(model)
        try:
            log_probs = model.forward(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
        except AttributeError as error:
            if "'NoneType' object has no attribute 'apply'" not in str(error):
                raise
            return judge(0.0, right=right, wrong=0.0, error=str(error))
    (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
    return judge(float(gradient[1, 0]), right=right, wrong=0.0)
