"""The router auxiliary loss of a mixture-of-experts model is multiplied by 0 when the model is wrapped.

In DPO, CPO, ORPO, KTO and BCO ``get_batch_loss_metrics`` returns ``loss + getattr(model.config,
"router_aux_loss_coef", 0.0) * aux_loss``. In training ``model`` is the wrapped model that accelerate returned: the
``config`` of a ``DeepSpeedEngine`` is a dict without that attribute, and ``DistributedDataParallel`` has no
``config``. In evaluation ``model`` is the plain model.

TRL 0.12.0 reads the coefficient once, from the plain model, in ``__init__`` (pull requests 2200 for DPO, 2201 for the
others). The wrapper changes only the ``config`` that the method sees, and leaves the formula to it.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, absent_on, judge, with_config, wrapper
from ...model import Outcome
from ...testing import dpo_stub, tiny_moe_lm, wrapped_like_deepspeed


@wrapper
def read_coefficient_from_unwrapped_model(call: Call) -> Any:
    """Give ``get_batch_loss_metrics`` a view of its model whose ``config`` is the plain model's."""
    trainer, model = call.trainer, call["model"]
    if not trainer.aux_loss_enabled or hasattr(getattr(model, "config", None), "router_aux_loss_coef"):
        return call()
    plain = trainer.accelerator.unwrap_model(trainer.model)
    return call.with_(model=with_config(model, plain.config))()


@absent_on(ValueError, "too many values to unpack", "DPO fails with every mixture of experts here (TRL PR 2039)")
def aux_loss_is_in_the_loss_of_a_wrapped_model(module: ModuleType) -> Outcome:
    """Differentiate the loss of a wrapped model by the router's weight, 2: all tokens are 3.

    Right is the derivative of coefficient * weight^2 * mean token id, and 0 is wrong.
    """
    import torch

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    if getattr(module, f"{method}Trainer").__module__ != module.__name__ or not hasattr(module, f"{method}Config"):
        return absent("this module hands on what is in trl.experimental, where __init__ reads the coefficient")
    coefficient, token_id = 0.5, 3
    model = tiny_moe_lm(
        SimpleNamespace(router_aux_loss_coef=coefficient, output_router_logits=True, model_type="tiny"), router=2.0
    )
    trainer = dpo_stub(
        module,
        method,
        model=model,
        ref_model=model,
        aux_loss_enabled=True,
        aux_loss_coef=coefficient,  # 0.12.0 and later read it where earlier releases have the bug.
        calculate_KL=True,
        embedding_func=None,
        embedding_tokenizer=None,
        running=SimpleNamespace(mean=torch.tensor(0.0), update=lambda rewards: None),
        state=SimpleNamespace(global_step=0),
    )
    batch: dict[str, Any] = {"label": [True, False]}
    for side in ("prompt", "chosen", "rejected", "completion", "KL_completion"):
        tokens = torch.full((2, 4), token_id)
        batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = tokens, torch.ones_like(tokens)
        batch[f"{side}_labels"] = torch.tensor([[-100, -100, token_id, token_id]] * 2)
    loss, _ = trainer.get_batch_loss_metrics(wrapped_like_deepspeed(model), batch)
    (gradient,) = torch.autograd.grad(loss, model.router)
    return judge(float(gradient), right=coefficient * 2 * 2.0 * token_id, wrong=0.0)
