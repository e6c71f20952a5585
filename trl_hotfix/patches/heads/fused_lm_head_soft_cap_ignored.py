"""TRL's own LM head looks for the soft cap on the logits under one name of the config only.

The head multiplies the hidden states with the weights of the model's head and then applies to the logits what the
config has. It reads ``final_logit_softcapping``, which is Gemma's name. RecurrentGemma has the same cap as
``logits_soft_cap``, xLSTM as ``output_logit_soft_cap``; both families compute ``cap * tanh(logits / cap)``, as TRL
does. TRL reads the config while the head is made, so the config has the name for that long. Up to 1.10.0 the head
failed in the first step for these two, since the output of their decoders has no cache.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent_on, judge, shadowed, wrapper
from ...model import Outcome

_NAMES = ("logits_soft_cap", "output_logit_soft_cap")


@wrapper
def name_the_soft_cap(call: Call) -> Any:
    """Make the head with a config that has the cap under the name that TRL reads."""
    config = call["model"].config.get_text_config()
    cap = next((value for name in _NAMES if (value := getattr(config, name, None))), None)
    if cap is None or getattr(config, "final_logit_softcapping", None) is not None:
        return call()
    with shadowed(config, "final_logit_softcapping", cap):
        return call()


@absent_on(AttributeError, "past_key_values", "the first step of these models fails for another reason")
def head_has_the_soft_cap(module: ModuleType) -> Outcome:
    """Differentiate the loss by the weight that makes a logit z: (p - 1) (1 - tanh(z / cap)^2), and p - 1 with the bug.

    p is the probability of the label. TRL's kernel may need a GPU: one in torch stands for it.
    """
    import torch

    weight, tokens, cap = torch.arange(9.0).cos().reshape(3, 3).requires_grad_(), torch.tensor([[0, 1]]), 0.5
    config = SimpleNamespace(model_type="tiny", logits_soft_cap=cap)
    config.get_text_config = lambda: config

    class Model:
        lm_head = SimpleNamespace(weight=weight, bias=None)

        def base_model(self, input_ids: Any, **kwargs: Any) -> Any:
            # The outputs of the decoders of both families have no other fields that TRL reads.
            return SimpleNamespace(last_hidden_state=torch.eye(3)[input_ids], hidden_states=None)

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, input_ids: Any) -> None:
            """Have a signature."""

    class Kernel:
        @staticmethod
        def apply(states: Any, weight: Any, bias: Any, labels: Any, *settings: Any) -> tuple[Any, ...]:
            logits, cap = states @ weight.T, settings[2]
            logits = cap * (logits / cap).tanh() if cap else logits
            return logits.log_softmax(1).gather(1, labels[:, None])[:, 0], None, None, None, None

    model: Any = Model()
    model.config = config
    if hasattr(module, "add_fused_lm_head"):
        with shadowed(module, "_ChunkedLogProbFunction", Kernel):
            module.add_fused_lm_head(model)
            loss = model.forward(input_ids=tokens, labels=tokens, fused_lm_head=True).loss
    else:
        module._patch_chunked_ce_lm_head(model, 2)
        loss = model.forward(input_ids=tokens, labels=tokens).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    logits = weight[:, 0].detach()
    bounded = (logits / cap).tanh()
    right, wrong = (cap * bounded).softmax(0)[1] - 1, logits.softmax(0)[1] - 1
    return judge(float(gradient[1, 0]), right=float(right * (1 - bounded[1] ** 2)), wrong=float(wrong))
