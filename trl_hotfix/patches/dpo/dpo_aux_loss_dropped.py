"""DPO drops the router auxiliary loss of mixture-of-experts models.

The rewrite of ``DPOTrainer`` in TRL 0.29.0 (pull request 3906) left out the term
``router_aux_loss_coef * outputs.aux_loss``, which the loss had since 0.9.6. TRL 1.8.0 has it again (pull request 6208).

``_compute_loss`` calls the model that it is given once, for the policy; the reference is ``ref_model``, or
``self.model`` with its adapter off. So a view in the place of that argument sees the policy alone. Like 1.8.0 it asks
for the router's loss in the call: vision-language models look for it there, and not in their config.

Liger's loss calls the decoder, which returns no ``aux_loss``. Up to 0.28.0 that raised an ``AttributeError``, and 1.8.0
refuses the two together.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, WarnOnce, judge, wrapper
from ...model import Outcome
from ...testing import dpo_stub, tiny_moe_lm

_warn = WarnOnce()


def _coefficient(trainer: Any) -> Any:
    """Return the coefficient of the term. It is falsy where the model's config does not ask for the term."""
    # In a vision-language model the router settings are in the text model's config.
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    return getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0)


@wrapper
def add_aux_loss(call: Call) -> Any:
    """Add coefficient * aux_loss of the policy's forward, and log it as ``aux_loss`` as 1.8.0 does."""
    import wrapt

    trainer = call.trainer
    coefficient = _coefficient(trainer)
    if not coefficient:
        return call()
    aux_losses: list[Any] = []

    class RecordingView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = self.__wrapped__(*args, **{**kwargs, "output_router_logits": True})
            aux_losses.append(getattr(outputs, "aux_loss", None))
            return outputs

    result = call.with_(model=RecordingView(call["model"]))()
    (aux_loss,) = aux_losses
    if aux_loss is None:  # Llama 4 has the settings, and no such loss.
        return result
    mode = "train" if call.is_training else "eval"
    trainer._metrics[mode]["aux_loss"].append(trainer.accelerator.gather_for_metrics(aux_loss).mean().item())
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    loss = loss + coefficient * aux_loss.to(loss.device)
    return (loss, *outputs) if isinstance(result, tuple) else loss


@wrapper
def warn_of_liger(call: Call) -> Any:
    """Say once that Liger's loss has no auxiliary term, and leave it as it is."""
    if _coefficient(call.trainer):
        _warn(
            call.trainer,
            "output_router_logits=True, but the Liger loss of DPO has no router auxiliary loss: nothing balances the "
            "experts. TRL 1.8.0 refuses the two together. Train with use_liger_kernel=False, or set "
            "router_aux_loss_coef=0 in the model's config",
        )
    return call()


def aux_loss_is_in_the_loss(module: ModuleType) -> Outcome:
    """Differentiate the loss by the router's only weight: coefficient * d(aux_loss) / d(weight), and 0 with the bug."""
    import torch

    settings = SimpleNamespace(router_aux_loss_coef=0.5, output_router_logits=True)
    config = SimpleNamespace(get_text_config=lambda: settings, model_type="tiny")
    trainer = dpo_stub(
        module,
        model=tiny_moe_lm(config, router=2.0),
        ref_model=tiny_moe_lm(config, router=3.0),
        aux_loss_enabled=True,  # 1.8.0 reads these two. Releases with the bug have the model's config alone.
        router_aux_loss_coef=settings.router_aux_loss_coef,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        state=SimpleNamespace(global_step=0),
        _is_vlm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    token_ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    batch = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
    batch["completion_mask"] = torch.tensor([[0, 0, 1, 1]] * 2)
    loss = trainer._compute_loss(trainer.model, batch, False)
    (gradient,) = torch.autograd.grad(loss, trainer.model.router, allow_unused=True)
    right = 0.5 * 2 * 2.0 * float(token_ids.float().mean())
    return judge(0.0 if gradient is None else float(gradient), right=right, wrong=0.0)
