"""The router auxiliary loss of a mixture-of-experts model is multiplied by 0 when the model is wrapped.

In DPO, CPO, ORPO, KTO and BCO ``get_batch_loss_metrics`` returns ``loss + getattr(model.config,
"router_aux_loss_coef", 0.0) * aux_loss``. In training ``model`` is the wrapped model that accelerate returned: the
``config`` of a ``DeepSpeedEngine`` is a dict without that attribute, and ``DistributedDataParallel`` has no
``config``. In evaluation ``model`` is the plain model.

TRL 0.12.0 reads the coefficient once, from the plain model, in ``__init__`` (pull requests 2200 for DPO, 2201 for the
others). The wrapper changes only the ``config`` that the method sees, and leaves the formula to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, with_coefficient_of_plain_model
from ...model import Outcome, Verdict
from ...testing import dpo_stub, judge_with_gradients, tiny_moe_lm, wrapped_like_deepspeed

_COEFFICIENT = 0.5  # of the self-test


def read_coefficient_from_unwrapped_model(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``get_batch_loss_metrics`` a view of its model whose ``config`` is that of the plain model."""
    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)
    return wrapped(*args, **kwargs)


def aux_loss_is_in_the_loss_of_a_wrapped_model(module: ModuleType) -> Outcome:
    """Check losses and gradients of two steps of two micro-batches, and of an evaluation, through a wrapped model.

    Right is the loss without auxiliary loss plus coefficient * aux_loss, wrong is the first of these.
    """
    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    if trainer_class.__module__ != module.__name__ or not hasattr(module, f"{method}Config"):
        return absent(
            "this module only hands on what is in trl.experimental, where the coefficient is read in __init__"
        )
    config = SimpleNamespace(router_aux_loss_coef=_COEFFICIENT, output_router_logits=True, model_type="tiny")
    model = tiny_moe_lm(config)
    trainers = [_stub(module, method, model, tiny_moe_lm(config, router=3.0)) for _ in range(2)]
    parameters, wrapped_model = [model.weight, model.router], wrapped_like_deepspeed(model)
    try:
        outcome = judge_with_gradients(parameters, _losses(wrapped_model, *trainers))
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return absent("DPO fails with every mixture-of-experts model in this release (TRL pull request 2039)")
    if outcome.verdict is Verdict.FIXED:
        # As DistributedDataParallel, with which the bug is an AttributeError.
        del wrapped_model.config
        return judge_with_gradients(parameters, _losses(wrapped_model, *trainers))
    return outcome


def _stub(module: ModuleType, method: str, model: Any, reference: Any) -> Any:
    import torch

    return dpo_stub(
        module,
        method,
        model=model,
        ref_model=reference,
        aux_loss_coef=_COEFFICIENT,
        calculate_KL=True,
        embedding_func=None,
        embedding_tokenizer=None,
        running=SimpleNamespace(mean=torch.tensor(0.0), update=lambda rewards: None),
        state=SimpleNamespace(),
    )


def _losses(wrapped_model: Any, training: Any, evaluating: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Give the loss of each micro-batch as it is measured, right and wrong."""
    model = training.model
    for number, (step, trainer) in enumerate(
        [(0, training), (0, training), (1, training), (1, training), (2, evaluating)]
    ):
        trainer.state.global_step = step
        model.train(trainer is training)
        batch = _batch(number)
        trainer.aux_loss_enabled = False
        without, _ = trainer.get_batch_loss_metrics(wrapped_model, batch)
        trainer.aux_loss_enabled = True
        model.aux_losses.clear()
        measured, _ = trainer.get_batch_loss_metrics(wrapped_model, batch)
        # KTO's forward for its divergence has no gradient.
        (aux_loss,) = (value for value in model.aux_losses if value.requires_grad)
        yield measured, without + _COEFFICIENT * aux_loss, without


def _batch(number: int) -> dict[str, Any]:
    """Return two or three rows. The completions have two or three of the four tokens, by their labels.

    DPO, CPO and ORPO compare two completions; KTO and BCO label single ones; KTO adds unrelated ones for its KL.
    """
    import torch

    rows = 2 + number % 2
    tokens = 1 + (torch.arange(4 * rows).reshape(rows, 4) * 7 + 3 * number) % 10
    sides = {"prompt": tokens[:, :2], "chosen": tokens, "rejected": tokens.flip(1)}
    sides |= {"completion": tokens, "KL_completion": tokens.flip(0)}
    batch: dict[str, Any] = {"label": [True, False, True][:rows]}
    for side, ids in sides.items():
        first = 1 + torch.arange(rows) % 2
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = torch.ones_like(ids)
        batch[f"{side}_labels"] = ids.masked_fill(torch.arange(ids.shape[1]) < first[:, None], -100)
    return batch
