"""Stand-ins for GRPO's trainer in the middle of a step: the loss of one batch."""

from __future__ import annotations

import inspect
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from .trainers import default_arguments, stub_trainer


def stub_grpo_trainer(
    module: ModuleType, log_probs: Any = None, reference: Any = None, *, training: bool = True, **settings: Any
) -> Any:
    """Return a GRPO trainer in the middle of a step, whose loss of one batch can be computed in every release.

    ``log_probs`` and ``reference``, of shape ``(batch, completion length)``, are the results of the forward passes of
    the policy and of its reference; without ``log_probs`` the real ones run. ``settings`` are fields of ``GRPOConfig``;
    a release that has no such field ignores it.
    """
    trainer = stub_trainer(
        module.GRPOTrainer,
        default_arguments(module.GRPOConfig, **{"report_to": [], **settings}),
        model=SimpleNamespace(training=training),
        ref_model=SimpleNamespace(),
        control=SimpleNamespace(should_evaluate=not training),
        # 0.27 multiplies the loss by a factor of the step.
        state=SimpleNamespace(global_step=0),
        _metrics=metrics_by_mode(),
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        use_liger_loss=False,
        tools=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    if log_probs is not None:
        with_entropies = getattr(module.GRPOTrainer, "_get_per_token_logps_and_entropies", None)
        # From 1.7 on the auxiliary loss of a mixture-of-experts model is a third value.
        has_aux_loss = with_entropies is not None and "compute_aux_loss" in inspect.signature(with_entropies).parameters
        aux_loss = (None,) if has_aux_loss else ()
        # 0.18 computes the reference's log-probs in the loss, by the same method.
        by_model = {id(trainer.ref_model): reference}
        trainer._get_per_token_logps = lambda model, *args, **kwargs: by_model.get(id(model), log_probs)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (log_probs, -log_probs.detach(), *aux_loss)
    return trainer


def metrics_by_mode() -> Any:
    """Return an empty ``_metrics`` of a GRPO or RLOO trainer. Up to 0.15 the metrics are not kept by mode."""
    return defaultdict(list, {"train": defaultdict(list), "eval": defaultdict(list)})
