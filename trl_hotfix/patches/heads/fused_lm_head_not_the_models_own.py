"""TRL's own LM head multiplies the states of the decoder with the weights of the output embeddings, and little more.

It applies the scale and the soft cap that it finds in the config under the names that it knows. What else a model does
between its decoder and its logits is left out, and so is a scale under a name that a release does not know yet: 1.4.0
knew ``logit_scale`` only, 1.15.0 also ``logits_scaling`` and ``lm_head_multiplier``.

The model answers whether the head is its own. In the first call of its forward, both are given the same states: the
decoder's ``forward`` returns them for that long, so the decoder is not run, and no random number is drawn. The states
are a fixed function of their index. All ranks have the same ones and decide alike, without asking one another.

If they differ, TRL's forward runs on with another ``self``, whose decoder returns the logits of the model in the place
of states, and with other names: what TRL calls to project states scores these logits. Everything else is TRL's: labels,
masks, the number of items, the auxiliary loss, the outputs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, decoder_returns, judge, shadowed, with_names, wrapper
from ...model import Outcome
from ...testing import recorded_warnings

_SIZES = (1.0, 8.0, 64.0)
"""How large the states are. A bias shows in small ones, a cap in large ones."""

_STATES = 9
_TOLERANCE = 0.02
"""By how much the losses may differ, as a part of the loss. Logits in bf16 are rounded to 0.004 of themselves."""

_TOKENS = 1024
"""So many tokens are scored at a time, so that float32 copies of all logits are never there at once."""

_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's kernel returns, in its order."""

_FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code of a model raises that does not expect to be called with a decoder which returns nothing but states."""


@wrapper
def compare_the_chunked_loss(call: Call) -> Any:
    """Give the model a forward that uses TRL's chunked loss if the model's own logits give it too. Up to 1.14."""
    result, model, loss = call(), call["model"], "_chunked_cross_entropy_loss"
    names = {"_chunk": _scored_chunk}
    _install(call, {loss: with_names(model.forward.__func__.__globals__[loss], names)})
    return result


@wrapper
def compare_the_fused_head(call: Call) -> Any:
    """Give the model a forward that uses TRL's fused head if its log-probs are the model's. From 1.15 on."""
    result = call()
    _install(call, {"_ChunkedLogProbFunction": _Kernel}, call["temperature"], fused_lm_head=True)
    return result


def _install(call: Call, names: Mapping[str, Any], temperature: float = 1.0, **flags: Any) -> None:
    """Give the model a forward that asks it once. ``names``: those of TRL's forward by which logits are scored."""
    import torch

    model = call["model"]
    # A class that takes this argument has such a head itself. The stand-ins of other self-tests do.
    if "fused_lm_head" in inspect.signature(type(model).forward).parameters:
        return
    fused, act = model.forward.__func__, call.act_later()
    of_logits = with_names(fused, names)
    answers: list[bool] = []
    # What is done once is not compiled.
    is_own = torch.compiler.disable(_is_own)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append(is_own(self, fused, temperature, flags))
        if all(answers):
            return fused(self, *args, **kwargs)
        act()
        return of_logits(_WithLogits(self, fused), *args, **kwargs)

    # generate() and Trainer read the signature of the model's own forward.
    vars(forward).update(vars(fused), __signature__=inspect.signature(fused))
    model.forward = MethodType(forward, model)


class _WithLogits:
    """A model whose decoder returns its logits in the place of its last states."""

    def __init__(self, model: Any, fused: Callable[..., Any]) -> None:
        def decoder(*args: Any, **kwargs: Any) -> Any:
            outputs = fused(model, *args, **kwargs)
            outputs.last_hidden_state = outputs.logits
            return outputs

        self._model = model
        # Under which of these TRL finds the decoder depends on transformers.
        self.base_model = self.model = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_own(model: Any, fused: Callable[..., Any], temperature: float, flags: Mapping[str, Any]) -> bool:
    """Return whether TRL's head equals the model's own, or we cannot tell. Warn if TRL uses it all the same."""
    try:
        weight = model.get_output_embeddings().weight
        if weight.dim() != 2 or hasattr(weight, "full_tensor"):
            raise ValueError("its weights are sharded")
        losses = [_losses(model, fused, temperature, flags, weight, size) for size in _SIZES]
    except _FAILURES as error:
        _warn("TRL's LM head is used, and cannot be compared with that of %s: %r", type(model).__name__, error)
        return True
    # NaN is a difference.
    is_own = all(abs(trls - own) < _TOLERANCE * own for trls, own in losses)
    if not is_own:
        numbers = ", ".join(f"{trls:.4g} for {own:.4g}" for trls, own in losses)
        _warn(
            "the logits of %s are used, which takes more memory: TRL's LM head is another one, the losses of some "
            "states would be %s",
            type(model).__name__,
            numbers,
        )
    return is_own


def _losses(
    model: Any, fused: Callable[..., Any], temperature: float, flags: Mapping[str, Any], weight: Any, size: float
) -> tuple[float, float]:
    """Return the loss of states of this size by TRL's head and by the model's. A wrong scale moves it most."""
    import torch

    index = torch.arange(_STATES * weight.shape[1], device=weight.device)
    states = (size * index.sin()).reshape(1, _STATES, -1).to(weight.dtype)
    with torch.no_grad(), decoder_returns(model, states) as calls:
        # Nobody reads the tokens, but their number.
        logits = fused(model, input_ids=torch.zeros_like(states.argmin(-1))).logits.float() / temperature
        if not calls:
            raise LookupError("it does not call its decoder")
        # The least likely tokens.
        labels = logits.argmin(-1)
        own = (logits.logsumexp(-1) - logits.amin(-1)).mean()
        trls = fused(model, shift_labels=labels, output_router_logits=False, **flags).loss
    return float(trls), float(own)


def _scores(logits: Any, labels: Any, temperature: float) -> tuple[Any, ...]:
    """Return ``_OUTPUTS`` of logits, ``(tokens, vocabulary)``. The first two can be differentiated."""
    import torch

    logits = logits.float() / temperature
    log_probs = logits - logits.logsumexp(1, keepdim=True)
    constant = log_probs.detach()
    return (
        log_probs.gather(1, labels[:, None]).squeeze(1),
        torch.special.entr(log_probs.exp()).sum(1),
        (2 * constant).logsumexp(1),
        logits.detach().mean(1),
        constant.argmax(1) == labels,
    )


def _scored_chunk(logits: Any, weight: Any, bias: Any, labels: Any, *settings: Any) -> tuple[Any, Any, Any]:
    """Stand for TRL's ``_chunk``: return the sums of the losses, of the likeliest labels and of the entropies."""
    counted = labels != -100
    log_probs, entropy, _, _, is_top1 = _scores(logits[counted], labels[counted], 1.0)
    return -log_probs.sum(), is_top1.sum().float(), entropy.sum()


class _Kernel:
    """Stand for TRL's kernel, whose ``apply`` TRL calls."""

    @staticmethod
    def apply(
        logits: Any, weight: Any, bias: Any, labels: Any, temperature: float, *settings: Any
    ) -> tuple[Any | None, ...]:
        """Return ``_OUTPUTS``, each ``(tokens,)``, or None for those that are not asked for."""
        import torch
        from torch.utils.checkpoint import checkpoint

        chunks = zip(logits.split(_TOKENS), labels.split(_TOKENS), strict=True)
        parts = [checkpoint(_scores, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        results = dict(zip(_OUTPUTS, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True))
        return tuple(results[name] if name in ("log_probs", *settings[-1]) else None for name in _OUTPUTS)


def _warn(message: str, *values: Any) -> None:
    logging.getLogger("trl_hotfix").warning(f"fused-lm-head-not-the-models-own: {message}", *values)


def loss_is_that_of_the_models_logits(module: ModuleType) -> Outcome:
    """Differentiate the loss of logits that are twice TRL's by a weight: 2 (p - 1), with the p of these logits.

    TRL's head has p - 1, with a p of half of them. Its kernel may need a GPU: one in torch stands for it.
    """
    import torch

    weight, tokens = torch.arange(9.0).cos().reshape(3, 3).requires_grad_(), torch.tensor([[0, 1]])
    config = SimpleNamespace()
    config.get_text_config = lambda: config

    class Decoder:
        def __call__(self, **kwargs: Any) -> Any:
            return self.forward(**kwargs)

        def forward(self, input_ids: Any, **kwargs: Any) -> Any:
            states = torch.eye(3)[input_ids]
            return SimpleNamespace(last_hidden_state=states, past_key_values=None, hidden_states=None, attentions=None)

    class Model:
        base_model, lm_head = Decoder(), SimpleNamespace(weight=weight, bias=None)

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, input_ids: Any, **kwargs: Any) -> Any:
            outputs = self.base_model(input_ids=input_ids)
            outputs.logits = outputs.last_hidden_state @ (2 * weight).T
            return outputs

    class Kernel:
        @staticmethod
        def apply(states: Any, weight: Any, bias: Any, labels: Any, *settings: Any) -> tuple[Any, ...]:
            return (states @ weight.T).log_softmax(1).gather(1, labels[:, None])[:, 0], None, None, None, None

    model: Any = Model()
    model.config, is_fused = config, hasattr(module, "add_fused_lm_head")
    (module.add_fused_lm_head if is_fused else module._patch_chunked_ce_lm_head)(model, *(() if is_fused else (2,)))
    with recorded_warnings(), shadowed(module, "_ChunkedLogProbFunction", Kernel) if is_fused else nullcontext():
        loss = model.forward(input_ids=tokens, labels=tokens, **({"fused_lm_head": True} if is_fused else {})).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    right, wrong = (scale * ((scale * weight[:, 0]).softmax(0)[1].item() - 1) for scale in (2, 1))
    return judge(float(gradient[1, 0]), right=right, wrong=wrong)
