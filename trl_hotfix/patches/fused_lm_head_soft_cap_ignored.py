"""TRL's own LM head looks for the soft cap on the logits under one name of the config only.

The head multiplies the hidden states with the weights of the model's head and then applies to the logits what the
config has. It reads ``final_logit_softcapping``, which is Gemma's name. RecurrentGemma has the same cap as
``logits_soft_cap``, xLSTM as ``output_logit_soft_cap``; both families compute ``cap * tanh(logits / cap)``, as TRL
does. TRL reads the config while the head is made, so the config has the name for that long. Up to 1.10.0 the head
failed in the first step for these two, since the output of their decoders has no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..testing import StopConstruction, tiny_attention_model

_NAMES = ("logits_soft_cap", "output_logit_soft_cap")


def name_the_soft_cap(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the head with a config that has the cap under the name that TRL reads."""
    config = argument(wrapped, args, kwargs, "model").config.get_text_config()
    cap = next((value for name in _NAMES if (value := getattr(config, name, None))), None)
    if cap is None or getattr(config, "final_logit_softcapping", None) is not None:
        return wrapped(*args, **kwargs)
    with shadowed(config, "final_logit_softcapping", cap):
        return wrapped(*args, **kwargs)


def head_has_the_soft_cap(module: ModuleType) -> Outcome:
    """Find the cap that the head applies for a model whose config has a ``logits_soft_cap`` of 0.5. 0 means no cap.

    TRL's own kernel is not run, since it may need a GPU: a stub reads the cap from its arguments. Where the kernel is
    not called, the loss shows the cap: it is the cross-entropy of ``0.5 * tanh(logits / 0.5)``.
    """
    import torch

    cap = 0.5
    model = tiny_attention_model()
    model.config.logits_soft_cap = cap
    tokens = torch.tensor([[3, 4, 5, 6]])
    states = model.base_model(input_ids=tokens).last_hidden_state
    hidden = states[:, :-1]
    # The outputs of the decoders of both families have no other fields that TRL reads.
    model.base_model.register_forward_hook(lambda *_: SimpleNamespace(last_hidden_state=states, hidden_states=None))
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)[0].detach()
    expected_losses = {
        value: float(
            torch.nn.functional.cross_entropy(value * torch.tanh(logits / value) if value else logits, tokens[0, 1:])
        )
        for value in (cap, 0.0)
    }
    applied_caps: list[float] = []

    class Kernel:
        @staticmethod
        def apply(*args: Any) -> None:
            # hidden, weight, bias, targets, temperature, chunk size, soft cap, scale, outputs
            applied_caps.append(args[6] or 0.0)
            raise StopConstruction

    if hasattr(module, "add_fused_lm_head"):
        with shadowed(module, "_ChunkedLogProbFunction", Kernel):
            module.add_fused_lm_head(model)
            try:
                loss = float(model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss.detach())
            except StopConstruction:
                loss = expected_losses[applied_caps[0]]
    else:
        module._patch_chunked_ce_lm_head(model, chunk_size=2)
        try:
            loss = float(model(input_ids=tokens, labels=tokens).loss.detach())
        except AttributeError as error:
            if "past_key_values" not in str(error):
                raise
            return absent("the first step of these models fails for another reason")
    measured = min(expected_losses, key=lambda value: abs(expected_losses[value] - loss))
    if abs(expected_losses[measured] - loss) > 1e-5:
        raise AssertionError(f"the loss is {loss}, with and without the cap it would be {expected_losses}")
    return judge(measured, right=cap, wrong=0.0, loss=loss)
