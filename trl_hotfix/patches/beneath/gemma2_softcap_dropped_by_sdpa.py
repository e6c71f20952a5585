"""Gemma 2 caps the logits of its attention, and the ``sdpa`` of torch, which transformers takes by default, has no cap.

Up to 4.47 transformers took ``eager`` for Gemma 2 by default. From 4.48 on ``sdpa_attention_forward`` gets ``softcap``
and ignores it. 4.50 to 4.56 advise ``eager`` in the log when training begins, and 4.57 says nothing any more.

``create_optimizer`` comes before the first batch in each trainer that has transformers' loop, and after TRL has made
the reference model.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, wrapper
from ...model import Options, Outcome
from ...testing import recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_is_first_warning = Once()


@wrapper
def warn_or_attend_eagerly(call: Call, options: Options) -> Any:
    """Warn of a soft cap that the attention drops, once for each trainer, or let model and reference keep it."""
    trainer = call.trainer
    uncapped = _uncapped(trainer.model)
    # A reference that was computed before has no cap, and must meet a policy without one.
    if options["attention"] == "eager" and not getattr(trainer.args, "precompute_ref_log_probs", False):
        for layer in uncapped + _uncapped(getattr(trainer, "ref_model", None)):
            call.act()
            layer.config._attn_implementation = "eager"
    elif uncapped and _is_first_warning(trainer):
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning(
                "%s: %d layers of the model train without the soft cap of their attention "
                "(attn_logit_softcapping=%s), which sdpa drops: it was trained with it, and vLLM samples with it. Load "
                "it with attn_implementation='eager', or set "
                "TRL_HOTFIX_OPTIONS=gemma2-softcap-dropped-by-sdpa.attention=eager. Either takes more memory",
                type(trainer).__name__,
                len(uncapped),
                uncapped[0].attn_logit_softcapping,
            )
    return call()


def _uncapped(model: Any) -> list[Any]:
    """Return the attention layers that have a soft cap and drop it."""
    return [
        module
        for module in (model.modules() if model is not None else ())
        if getattr(module, "attn_logit_softcapping", None) is not None and module.config._attn_implementation == "sdpa"
    ]


def a_dropped_cap_is_reported(module: ModuleType, options: Options) -> Outcome:
    """Begin to train a layer whose cap sdpa drops: it is reported, or another attention is set."""
    import torch
    import transformers
    from packaging.version import Version
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not Version("4.57") <= Version(transformers.__version__):
        return absent("this transformers takes eager attention, or says that it should be")
    layer: Any = torch.nn.Module()
    layer.config = SimpleNamespace(_attn_implementation="sdpa")
    layer.is_causal, layer.attn_logit_softcapping = True, 0.5
    states = torch.arange(8.0).reshape(1, 1, 4, 2)
    plain, _ = sdpa_attention_forward(layer, states, states, states, None)
    try:
        capped, _ = sdpa_attention_forward(layer, states, states, states, None, softcap=0.5)
    except ValueError:
        return absent("sdpa refuses a cap")
    if not capped.equal(plain):
        return absent("sdpa has a cap")
    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    trainer = stub_trainer(trainer_class, SimpleNamespace(), model=layer, optimizer="made by the user")
    with recorded_warnings() as lines:
        trainer.create_optimizer()
    if options["attention"] == "eager":
        return judge(float(layer.config._attn_implementation == "eager"), right=1, wrong=0)
    return judge(sum("soft cap" in line for line in lines), right=1, wrong=0)
