"""The router auxiliary loss of a mixture-of-experts model is multiplied by 0 when the model is wrapped.

In DPO, CPO, ORPO, KTO and BCO ``get_batch_loss_metrics`` returns ``loss + getattr(model.config,
"router_aux_loss_coef", 0.0) * aux_loss``. In training ``model`` is the wrapped model that accelerate returned: the
``config`` of a ``DeepSpeedEngine`` is a dict without that attribute, and ``DistributedDataParallel`` has no
``config``. In evaluation ``model`` is the plain model.

TRL 0.12.0 reads the coefficient once, from the plain model, in ``__init__`` (pull requests 2200 for DPO, 2201 for the
others). The wrapper changes only the ``config`` that the method sees, and leaves the formula to it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge, with_coefficient_of_plain_model
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm, wrapped_like_deepspeed


def read_coefficient_from_unwrapped_model(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``get_batch_loss_metrics`` a view of its model whose ``config`` is that of the plain model."""
    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)
    return wrapped(*args, **kwargs)


def aux_loss_is_in_the_loss_of_a_wrapped_model(module: ModuleType) -> Outcome:
    """Check that the loss of a wrapped model is the loss without auxiliary loss plus coefficient * aux_loss."""
    import torch

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    if trainer_class.__module__ != module.__name__ or not hasattr(module, f"{method}Config"):
        return absent(
            "this module only hands on what is in trl.experimental, where the coefficient is read in __init__"
        )
    coefficient, aux_loss = 0.5, 2.0
    config = SimpleNamespace(router_aux_loss_coef=coefficient, output_router_logits=True, model_type="tiny")
    model = tiny_causal_lm(config, aux_loss=aux_loss)
    trainer = dpo_stub(
        module,
        method,
        model=model,
        ref_model=tiny_causal_lm(config, aux_loss=aux_loss),
        aux_loss_coef=coefficient,
        calculate_KL=True,
        embedding_func=None,
        embedding_tokenizer=None,
        running=SimpleNamespace(mean=torch.tensor(0.0), update=lambda rewards: None),
    )
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    # DPO, CPO and ORPO compare two completions; KTO and BCO label single ones; KTO adds unrelated ones for its KL.
    sides = {"prompt": tokens[:, :2], "chosen": tokens, "rejected": tokens.flip(1)}
    sides |= {"completion": tokens, "KL_completion": tokens.flip(0)}
    batch: dict[str, Any] = {"label": [True, False]}
    for side, ids in sides.items():
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = torch.ones_like(ids)
        batch[f"{side}_labels"] = ids.clone()

    def loss_through(policy: Any, *, aux_loss_enabled: bool) -> float:
        trainer.aux_loss_enabled = aux_loss_enabled
        loss, _ = trainer.get_batch_loss_metrics(policy, batch)
        return float(loss.detach())

    loss_without_aux = loss_through(model, aux_loss_enabled=False)
    try:
        measured = loss_through(wrapped_like_deepspeed(model), aux_loss_enabled=True)
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return absent("DPO fails with every mixture-of-experts model in this release (TRL pull request 2039)")
    right = loss_without_aux + coefficient * aux_loss
    return judge(measured, right=right, wrong=loss_without_aux, coefficient=coefficient, aux_loss=aux_loss)
