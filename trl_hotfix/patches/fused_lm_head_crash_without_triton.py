"""TRL 1.15.0 cannot take a training step where there is no Triton.

SFT, DPO, KTO, GRPO and RLOO of 1.15.0 score tokens by ``_ChunkedLogProbFunction``, written in Triton. Where that cannot
be imported, on macOS, on Windows and with a build of torch for the CPU, the name is None, and the first step raises
``AttributeError: 'NoneType' object has no attribute 'apply'``. Where it can be imported and there is no GPU, Triton
raises in the first step that it has no driver. TRL 1.16.0 does the same in torch there.

Here the forward that ``add_fused_lm_head`` has given the model is one with the same code, for which that name is a
computation in torch: the projection, ``logit_scale``, the soft cap and the temperature in the order of TRL's kernel, in
float32, for 1024 tokens at a time, computed again in the backward pass. Where Triton runs, nothing is changed. Under
DeepSpeed ZeRO-3 without Triton, which nobody has been seen to use, the backward pass would miss the gathered head.
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

from ..authoring import argument, judge, module_of, shadowed
from ..model import Outcome
from ..stubs import tiny_attention_model

_TOKENS = 1024
_NAME = "_ChunkedLogProbFunction"


def score_in_torch(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the model a forward that needs no Triton, where Triton does not run."""
    result = wrapped(*args, **kwargs)
    function = getattr(module_of(wrapped), _NAME)
    if function is not None and _triton_runs():
        return result
    model = argument(wrapped, args, kwargs, "model")
    theirs = model.forward.__func__
    names = {**theirs.__globals__, _NAME: _InTorch}
    ours = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    # generate() looks at the signature of the model's own forward, which TRL has put here.
    model.forward = MethodType(update_wrapper(ours, theirs.__wrapped__), model)
    return result


def _triton_runs() -> bool:
    import torch

    xpu = getattr(torch, "xpu", None)
    return os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() or bool(xpu and xpu.is_available())


class _InTorch:
    """What TRL calls of ``ChunkedLogProbFunction``."""

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
        """Of ``(tokens, width)``, ``(vocabulary, width)`` and ``(tokens,)``: five times ``(tokens,)``, or None.

        These are log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1; the last three have no gradient.
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
            every = logits.log_softmax(-1)
            found = [every.gather(-1, targets[:, None])[:, 0]]
            if "entropy" in outputs:
                found.append(-(every.exp() * every).sum(-1))
            with torch.no_grad():
                if "log_sum_sq_probs" in outputs:
                    found.append((2 * every).logsumexp(-1))
                if "mean_logits" in outputs:
                    found.append(logits.mean(-1))
                if "is_top1" in outputs:
                    found.append(every.argmax(-1) == targets)
            return tuple(found)

        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # No token at all is one piece too, so that a batch without labels has a gradient of 0.
        pieces = [
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
        asked = ("log_probs", *(name for name in _OPTIONAL if name in outputs))
        found = dict(zip(asked, (torch.cat(its) for its in zip(*pieces, strict=True)), strict=True))
        return tuple(found.get(name) for name in ("log_probs", *_OPTIONAL))


_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def tokens_are_scored_without_triton(module: ModuleType) -> Outcome:
    """The log-prob of three tokens and its gradient, in a module that was imported where there is no Triton.

    What such a module has instead is found out by importing the kernels once more, unseen, without Triton.
    """
    import torch

    model = tiny_attention_model()
    # Its own forward answers like TRL's head. Here it is TRL's that is looked at.
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
        (its,) = torch.autograd.grad(outputs.log_probs.sum(), model.lm_head.weight)
    off = float((its - gradient).abs().max())
    if off > 1e-5:
        raise AssertionError(f"the log-probs are {outputs.log_probs}, and their gradient is off by {off}")
    return judge(float(outputs.log_probs.sum().detach()), right=float(right.detach()), wrong=0.0)


@contextmanager
def _as_without_triton(module: ModuleType) -> Iterator[None]:
    """In here, this module is as if it had been imported where there is no Triton."""

    def refuse(name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError(name, name=name)
        if "is_triton_available" in (names or ()):
            return SimpleNamespace(is_triton_available=lambda: False)
        return builtins.__import__(name, namespace, local, names, level)

    function = None
    spec = importlib.util.find_spec("trl.kernels.chunked_logprob") if getattr(module, _NAME) is not None else None
    if spec is not None and spec.loader is not None:
        unseen = importlib.util.module_from_spec(spec)
        vars(unseen)["__builtins__"] = {**vars(builtins), "__import__": refuse}
        try:
            spec.loader.exec_module(unseen)
            function = unseen.ChunkedLogProbFunction
        except ImportError as error:
            if not str(error.name).startswith("triton"):
                raise
    with ExitStack() as stack:
        stack.enter_context(shadowed(module, _NAME, function))
        if hasattr(module, "_use_triton"):
            stack.enter_context(shadowed(module, "_use_triton", lambda device: False))
        yield
