"""TRL's own LM head looks for the soft cap on the logits under one name of the config only.

The head multiplies the hidden states with the weights of the model's head and then applies to the logits what the
config has. It reads ``final_logit_softcapping``, which is Gemma's name. RecurrentGemma has the same cap as
``logits_soft_cap``, xLSTM as ``output_logit_soft_cap``; both families compute ``cap * tanh(logits / cap)``, as TRL
does. TRL reads the config while the head is made, so the config has the name for that long. Up to 1.10.0 the head
failed in the first step for these two, since the output of their decoders has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent_on, agreed, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction

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
    """Find the caps that the heads of four models apply: under both names, and in the config of a model's text part.

    A model without a cap, and those that have one under the name that TRL reads, are left alone.
    """
    outcome = agreed(
        judge(_Case(module, name, cap, text_part=text_part).applied(), right=cap, wrong=0.0, name=name)
        for name in _NAMES
        for cap, text_part in ((0.5, False), (0.75, True))
    )
    for name, cap, other in (
        ("logits_soft_cap", None, {}),
        ("final_logit_softcapping", 0.25, {}),
        ("final_logit_softcapping", 0.25, {"logits_soft_cap": 0.5}),
    ):
        case = _Case(module, name, cap, other)
        if (applied := case.applied()) != (cap or 0.0) or case.was_changed:
            raise AssertionError(f"with {case.settings} the head is made with {applied}")
    return outcome


class _Case:
    """A model whose config, or that of its text part, has a cap under this name, and ``other`` settings."""

    def __init__(
        self,
        module: ModuleType,
        name: str,
        cap: float | None,
        other: Mapping[str, float] = MappingProxyType({}),
        *,
        text_part: bool = False,
    ) -> None:
        import torch

        self.module, self.was_changed, self.cap = module, False, cap
        self.settings = {"model_type": "tiny", name: cap, **other}
        config = SimpleNamespace(**self.settings)
        self.text_config = SimpleNamespace(**self.settings) if text_part else config
        if text_part:
            delattr(config, name)
        self.model: Any = torch.nn.Module()
        self.model.config, config.get_text_config = config, self._text_config
        self.model.lm_head = torch.nn.Linear(3, 7, bias=False)
        self.model.lm_head.weight.data = torch.cos(torch.arange(21.0)).reshape(7, 3)
        self.model.get_output_embeddings = lambda: self.model.lm_head
        self.states = 3 * torch.sin(torch.arange(12.0)).reshape(1, 4, 3)
        # The outputs of the decoders of both families have no other fields that TRL reads.
        outputs = SimpleNamespace(last_hidden_state=self.states, hidden_states=None)
        # Which of the names TRL takes depends on transformers.
        self.model.model = self.model.base_model = lambda **kwargs: outputs
        self.tokens = torch.tensor([[3, 4, 5, 6]])

    def _text_config(self) -> SimpleNamespace:
        now = {name: value for name, value in vars(self.text_config).items() if name != "get_text_config"}
        self.was_changed = self.was_changed or now != self.settings
        return self.text_config

    def applied(self) -> float:
        """Make the head, and return the cap that it applies. 0 means no cap.

        TRL's own kernel is not run, since it may need a GPU: a stub reads the cap from its arguments. Where the kernel
        is not called, the loss shows the cap: it is the cross-entropy of ``cap * tanh(logits / cap)``.
        """
        if not hasattr(self.module, "add_fused_lm_head"):
            self.module._patch_chunked_ce_lm_head(self.model, chunk_size=2)
            self._check_the_config()
            return self._cap_of(float(self.model.forward(input_ids=self.tokens, labels=self.tokens).loss.detach()))
        applied_caps: list[float] = []

        class Kernel:
            @staticmethod
            def apply(*args: Any) -> None:
                # hidden, weight, bias, targets, temperature, chunk size, soft cap, scale, outputs
                applied_caps.append(args[6] or 0.0)
                raise StopConstruction

        with shadowed(self.module, "_ChunkedLogProbFunction", Kernel), suppress(StopConstruction):
            self.module.add_fused_lm_head(self.model)
            self._check_the_config()
            self.model.forward(input_ids=self.tokens, labels=self.tokens, fused_lm_head=True)
        (applied,) = applied_caps
        return applied

    def _check_the_config(self) -> None:
        self.was_changed, before = False, self.was_changed
        self._text_config()
        if self.was_changed:
            raise AssertionError(f"the config is {self.text_config} afterwards, and was {self.settings}")
        self.was_changed = before

    def _cap_of(self, loss: float) -> float:
        import torch

        logits = torch.nn.functional.linear(self.states[0, :-1], self.model.lm_head.weight).detach()
        losses = {}
        for cap in (self.cap or 0.0, 0.0):
            capped = cap * torch.tanh(logits / cap) if cap else logits
            losses[cap] = float(torch.nn.functional.cross_entropy(capped, self.tokens[0, 1:]))
            if abs(losses[cap] - loss) < 1e-5:
                return cap
        raise AssertionError(f"the loss is {loss}, with and without the cap it would be {losses}")
