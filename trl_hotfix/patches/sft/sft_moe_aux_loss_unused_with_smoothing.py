"""With label smoothing SFT computes the router's auxiliary loss, logs it, and does not add it.

A label smoother takes logits and labels, so the model gets no labels and adds nothing to a loss. Up to 1.14.2 that is
``Trainer.compute_loss``, which SFT calls; from 1.15.0 on it is SFT's own branch for ``label_smoother``, beside the one
that adds ``router_aux_loss_coef * outputs.aux_loss``. TRL 0.23.0 adds a term of its own, also here.

The wrapper notes the outputs that the smoother gets, which have the graph, and adds the term to the loss, with the
weight that TRL 1.15.0 gives it without smoothing. Layers lie in the order of ids: this one is around
``sft-moe-aux-loss-times-gas``, which divides the coefficient for the time of the call.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, micro_batches, plain_model, wrapper
from ...model import Outcome
from ...testing import SftMoeStep, absent_if_reexported


@wrapper
def add_the_router_loss(call: Call) -> Any:
    """Add the auxiliary loss of the outputs that are smoothed."""
    import wrapt

    trainer, smoother = call.trainer, call.trainer.label_smoother
    if smoother is None or not (coefficient := _coefficient(trainer)):
        return call()
    smoothed = []

    class Recorder(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            smoothed.append(outputs)
            return self.__wrapped__(outputs, *args, **kwargs)

    # Not ``shadowed``: this alone does not act.
    trainer.label_smoother = Recorder(smoother)
    try:
        result = call()
    finally:
        trainer.label_smoother = smoother
    aux_loss = getattr(smoothed[0], "aux_loss", None) if smoothed else None
    if aux_loss is None:
        return result
    # ``Trainer`` divides by the micro-batches where the loss is not divided by the tokens of the step. An evaluation
    # may have a count, and has one batch.
    is_summed = call["num_items_in_batch"] is not None and trainer.model_accepts_loss_kwargs and trainer.model.training
    loss, *outputs = result if call["return_outputs"] else (result,)
    loss = loss + coefficient * aux_loss.to(loss.device) / (micro_batches(trainer) if is_summed else 1)
    return (loss, *outputs) if call["return_outputs"] else loss


def _coefficient(trainer: Any) -> float:
    """Return the coefficient as TRL's own losses find it: on the trainer, on the model, in the text model's config."""
    model = plain_model(trainer, trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    coefficients = (getattr(owner, "router_aux_loss_coef", None) for owner in (trainer, model, text))
    return next((coefficient for coefficient in coefficients if coefficient is not None), 0.0)


def router_loss_is_in_the_smoothed_loss(module: ModuleType) -> Outcome:
    """Differentiate the smoothed loss of one micro-batch of four by the auxiliary loss."""
    if reexported := absent_if_reexported(module, module.SFTTrainer.compute_loss):
        return reexported
    if "aux_loss_coef" in inspect.unwrap(module.SFTTrainer.compute_loss).__code__.co_names:
        return absent("this release adds the term itself, whatever the loss")

    class Smoother:
        ignore_index = -100

        def __call__(self, outputs: Any, labels: Any, **options: Any) -> Any:
            return outputs.cross_entropy

    coefficient = 0.5
    settings = {"label_smoother": Smoother(), "current_gradient_accumulation_steps": 4}
    step = SftMoeStep(module, coefficient, **settings)
    step.trainer.args.loss_type = "nll"
    _, weight = step.weights()
    return judge(weight, right=coefficient / 4, wrong=0.0)
