"""RecurrentGemma and xLSTM are trained without the soft cap on their logits.

From 1.15.0 on SFT, DPO, KTO, GRPO and RLOO score tokens by a head of TRL's own, which multiplies the hidden states with
the weights of the model's head and then does to the logits what the config says; before, SFT did so with
``loss_type="chunked_nll"``; up to 1.10.0 that failed in the first step for these two, whose decoders have no cache in
their output. It looks for ``final_logit_softcapping``, as Gemma calls it. RecurrentGemma calls the same
``logits_soft_cap``, xLSTM ``output_logit_soft_cap``: their logits are taken as they are, so the loss, the log-probs and
all gradients are those of another model than the one that generates.

Here the config says ``final_logit_softcapping`` while the head is made, which is when TRL reads it: both families
compute ``cap * tanh(logits / cap)``, as TRL does. Not repaired: models that put layers between the decoder and the head
(ModernBERT's decoder), and code from the hub whose forward does anything else to the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..stubs import StopConstruction, tiny_attention_model

_NAMES = ("logits_soft_cap", "output_logit_soft_cap")


def name_the_soft_cap(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the head with a config that has the cap under the name that TRL looks for."""
    config = argument(wrapped, args, kwargs, "model").config.get_text_config()
    cap = next((its for name in _NAMES if (its := getattr(config, name, None))), None)
    if cap is None or getattr(config, "final_logit_softcapping", None) is not None:
        return wrapped(*args, **kwargs)
    with shadowed(config, "final_logit_softcapping", cap):
        return wrapped(*args, **kwargs)


def head_has_the_soft_cap(module: ModuleType) -> Outcome:
    """By which cap does the head compute, for a model whose config has a ``logits_soft_cap`` of 0.5? 0 is none.

    TRL's own kernel is looked at, not run: it may be one that only runs on a GPU. Where it is not called, the loss says
    it, which is the cross-entropy of ``0.5 * tanh(logits / 0.5)``.
    """
    import torch

    cap = 0.5
    model = tiny_attention_model()
    model.config.logits_soft_cap = cap
    tokens = torch.tensor([[3, 4, 5, 6]])
    states = model.base_model(input_ids=tokens).last_hidden_state
    hidden = states[:, :-1]
    # What the decoders of both families answer has nothing else that TRL reads.
    model.base_model.register_forward_hook(lambda *_: SimpleNamespace(last_hidden_state=states, hidden_states=None))
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)[0].detach()
    of_cap = {
        its: float(torch.nn.functional.cross_entropy(its * torch.tanh(logits / its) if its else logits, tokens[0, 1:]))
        for its in (cap, 0.0)
    }
    used: list[float] = []

    class Kernel:
        @staticmethod
        def apply(*args: Any) -> None:
            # hidden, weight, bias, targets, temperature, size of a piece, soft cap, scale, outputs
            used.append(args[6] or 0.0)
            raise StopConstruction

    if hasattr(module, "add_fused_lm_head"):
        with shadowed(module, "_ChunkedLogProbFunction", Kernel):
            module.add_fused_lm_head(model)
            try:
                loss = float(model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss.detach())
            except StopConstruction:
                loss = of_cap[used[0]]
    else:
        module._patch_chunked_ce_lm_head(model, chunk_size=2)
        try:
            loss = float(model(input_ids=tokens, labels=tokens).loss.detach())
        except AttributeError as error:
            if "past_key_values" not in str(error):
                raise
            return absent("the first step of these models fails for another reason")
    measured = min(of_cap, key=lambda its: abs(of_cap[its] - loss))
    if abs(of_cap[measured] - loss) > 1e-5:
        raise AssertionError(f"the loss is {loss}, with and without the cap it would be {of_cap}")
    return judge(measured, right=cap, wrong=0.0, loss=loss)
