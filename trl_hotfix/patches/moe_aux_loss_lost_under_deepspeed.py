"""The router auxiliary loss of a mixture-of-experts model is multiplied by 0 when the model is wrapped.

``get_batch_loss_metrics`` returns ``loss + getattr(model.config, "router_aux_loss_coef", 0.0) * aux_loss``. In
training ``model`` is what accelerate made of it: the ``config`` of a ``DeepSpeedEngine`` is DeepSpeed's own dict, which
has no such attribute, so the term is silently 0 (TRL issue 2197); ``DistributedDataParallel`` has no ``config`` at all,
so the step raises ``AttributeError``. In evaluation ``model`` is the plain model, and the term is there.

TRL 0.12.0 reads the coefficient once, from the plain model, in ``__init__`` (pull requests 2200 and 2201). Here the
method is given a view of the wrapped model whose ``config`` is that of the plain one; its own formula does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import (
    absent,
    argument,
    default_arguments,
    judge,
    replaced_argument,
    stub_trainer,
    tiny_causal_lm,
    with_config,
    wrapped_like_deepspeed,
)
from ..model import Outcome


def read_coefficient_from_unwrapped_model(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``get_batch_loss_metrics`` a model whose ``config`` is the model's own."""
    model = argument(wrapped, args, kwargs, "model")
    if not instance.aux_loss_enabled or hasattr(getattr(model, "config", None), "router_aux_loss_coef"):
        return wrapped(*args, **kwargs)
    plain = instance.accelerator.unwrap_model(instance.model)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "model", with_config(model, plain.config))
    return wrapped(*args, **kwargs)


def aux_loss_is_in_the_loss_of_a_wrapped_model(leaf: ModuleType) -> Outcome:
    """The loss of one batch through a wrapped model has the auxiliary term that the plain model's has."""
    import torch

    coefficient, aux_loss = 0.5, 2.0
    config = SimpleNamespace(router_aux_loss_coef=coefficient, output_router_logits=True, model_type="tiny")
    model = tiny_causal_lm(config, aux_loss=aux_loss)
    reference = tiny_causal_lm(config, aux_loss=aux_loss)
    trainer = stub_trainer(
        leaf.DPOTrainer,
        default_arguments(leaf.DPOConfig),
        model=model,
        ref_model=reference,
        aux_loss_enabled=True,
        aux_loss_coef=coefficient,
        is_encoder_decoder=False,
        is_vision_model=False,
        is_peft_model=False,
        padding_value=0,
        pad_token_id=0,
        use_dpo_data_collator=True,
        _peft_has_been_casted_to_bf16=False,
    )
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    batch = {}
    for side, ids in {"prompt": tokens[:, :2], "chosen": tokens, "rejected": tokens.flip(1)}.items():
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = torch.ones_like(ids)
        batch[f"{side}_labels"] = ids.clone()

    def loss_through(given: Any) -> float:
        loss, _ = trainer.get_batch_loss_metrics(given, batch, train_eval="train")
        return float(loss.detach())

    try:
        plain = loss_through(model)
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return absent("DPO fails with every mixture-of-experts model in this release (TRL pull request 2039)")
    return judge(
        loss_through(wrapped_like_deepspeed(model)),
        right=plain,
        wrong=plain - coefficient * aux_loss,
        coefficient=coefficient,
        aux_loss=aux_loss,
    )
