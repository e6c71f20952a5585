"""TRL 1.15.0 cannot take a training step where Triton does not run.

Tokens are scored by ``_ChunkedLogProbFunction``, a Triton kernel. Where Triton cannot be imported (macOS, Windows, a
build of torch for the CPU) that name is None. TRL 1.16.0 computes the same in torch there.

The repair gives the model a forward with the code of the one that ``add_fused_lm_head`` has given it, but with a
computation in torch under that name: the projection, ``logit_scale``, the soft cap and the temperature in the order of
TRL's kernel, in float32, for 1024 tokens at a time, recomputed in the backward pass.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from ..authoring import act, argument, judge, module_of, shadowed
from ..model import Outcome
from ..testing import tiny_attention_model

_TOKENS = 1024
_NAME = "_ChunkedLogProbFunction"


def score_in_torch(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the model a forward that needs no Triton if Triton does not run."""
    result = wrapped(*args, **kwargs)
    function = getattr(module_of(wrapped), _NAME)
    if function is not None and _triton_runs():
        return result
    model = argument(wrapped, args, kwargs, "model")
    fused = model.forward.__func__
    names = {**fused.__globals__, _NAME: _TorchLogProbFunction}
    forward = FunctionType(fused.__code__, names, fused.__name__, fused.__defaults__, fused.__closure__)
    forward.__kwdefaults__ = fused.__kwdefaults__
    # generate() reads the signature of the model's own forward, which TRL keeps in __wrapped__.
    act()
    model.forward = MethodType(update_wrapper(forward, fused.__wrapped__), model)
    return result


def _triton_runs() -> bool:
    import torch

    xpu = getattr(torch, "xpu", None)
    return os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() or bool(xpu and xpu.is_available())


class _TorchLogProbFunction:
    """Replace ``ChunkedLogProbFunction``, of which TRL calls ``apply`` only."""

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
            logits = torch.nn.functional.linear(
                hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            )
            logits = logits.float() * logit_scale
            if final_logit_softcapping is not None:
                logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
            logits = logits / temperature
            log_probs = logits.log_softmax(-1)
            scores = [log_probs.gather(-1, targets[:, None])[:, 0]]
            if "entropy" in outputs:
                scores.append(-(log_probs.exp() * log_probs).sum(-1))
            with torch.no_grad():
                if "log_sum_sq_probs" in outputs:
                    scores.append((2 * log_probs).logsumexp(-1))
                if "mean_logits" in outputs:
                    scores.append(logits.mean(-1))
                if "is_top1" in outputs:
                    scores.append(log_probs.argmax(-1) == targets)
            return tuple(scores)

        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # An empty batch makes one chunk too, so that a batch without labels has a gradient of 0.
        chunks = [
            checkpoint(
                scored,
                hidden[begin : begin + _TOKENS],
                weight,
                bias,
                targets[begin : begin + _TOKENS],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for begin in range(0, max(len(hidden), 1), _TOKENS)
        ]
        names = ("log_probs", *(name for name in _OPTIONAL if name in outputs))
        results = dict(zip(names, (torch.cat(parts) for parts in zip(*chunks, strict=True)), strict=True))
        return tuple(results.get(name) for name in ("log_probs", *_OPTIONAL))


_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def tokens_are_scored_without_triton(module: ModuleType) -> Outcome:
    """Compare the log-prob of three tokens and its gradient with torch, in a module imported without Triton.

    A private copy of the kernels module, imported without Triton, shows what such a module has under the name.
    """
    import torch

    model = tiny_attention_model()
    # The model's own forward would return the same as TRL's head. The test measures TRL's head.
    tokens = torch.tensor([[3, 4, 5, 6]])
    hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1]
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    right = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum()
    (gradient,) = torch.autograd.grad(right, model.lm_head.weight)
    with ExitStack() as stack:
        stack.enter_context(_as_without_triton(module))
        module.add_fused_lm_head(model, outputs=("log_probs", *_OPTIONAL))
        try:
            outputs = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
        except AttributeError as error:
            if "'NoneType' object has no attribute 'apply'" not in str(error):
                raise
            return judge(0.0, right=float(right.detach()), wrong=0.0, error=str(error))
        (measured_gradient,) = torch.autograd.grad(outputs.log_probs.sum(), model.lm_head.weight)
    error_of_gradient = float((measured_gradient - gradient).abs().max())
    if error_of_gradient > 1e-5:
        raise AssertionError(f"the log-probs are {outputs.log_probs}, and their gradient is off by {error_of_gradient}")
    return judge(float(outputs.log_probs.sum().detach()), right=float(right.detach()), wrong=0.0)


@contextmanager
def _as_without_triton(module: ModuleType) -> Iterator[None]:
    """Put ``module`` into the state that it has when it is imported where there is no Triton."""

    def refuse(name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError(name, name=name)
        if "is_triton_available" in (names or ()):
            return SimpleNamespace(is_triton_available=lambda: False)
        return builtins.__import__(name, namespace, local, names, level)

    function = None
    spec = importlib.util.find_spec("trl.kernels.chunked_logprob") if getattr(module, _NAME) is not None else None
    if spec is not None and spec.loader is not None:
        kernels = importlib.util.module_from_spec(spec)
        vars(kernels)["__builtins__"] = {**vars(builtins), "__import__": refuse}
        try:
            spec.loader.exec_module(kernels)
            function = kernels.ChunkedLogProbFunction
        except ImportError as error:
            if not str(error.name).startswith("triton"):
                raise
    with ExitStack() as stack:
        stack.enter_context(shadowed(module, _NAME, function))
        if hasattr(module, "_use_triton"):
            stack.enter_context(shadowed(module, "_use_triton", lambda device: False))
        yield
