"""CISPO caps the ratio at ``epsilon_high`` itself, and TRL fills it in from ``epsilon``, which is a distance from 1.

MiniMax-M1 (arXiv:2506.13585, equation 5) caps the weight at ``1 + epsilon_high``, ScaleRL (arXiv:2510.13786) at
``epsilon_max``. TRL's loss has been ScaleRL's since 0.26.0, and its help recommends 5.0; the fallback is GRPO's.
``__init__`` reads the arguments for the loss, for its metric and for Liger, so they change before it does.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import StopConstruction, begin_trainer, stub_grpo_trainer, tiny_causal_lm

_RECOMMENDED = 5.0

_log = logging.getLogger("trl_hotfix")


@wrapper
def cap_as_recommended(call: Call) -> None:
    """Set ``args.epsilon_high`` where the cap of CISPO would be an ``epsilon`` below 1."""
    settings = call["args"]
    is_cispo = settings is not None and settings.loss_type == "cispo" and not _has_another_loss(call.trainer)
    if is_cispo and settings.epsilon_high is None and settings.epsilon < 1:
        _log.info(
            'loss_type="cispo" without epsilon_high: the ratio is capped at %g, and not at epsilon=%g',
            _RECOMMENDED,
            settings.epsilon,
        )
        settings.epsilon_high = _RECOMMENDED
        call.act()
    call()


def _has_another_loss(trainer: Any) -> bool:
    """Return whether it is a trainer such as GMPO, where ``epsilon_high`` means something else for any loss type."""
    return any(
        "_compute_loss" in vars(base) and base.__module__.startswith("trl.experimental.")
        for base in type(trainer).__mro__
    )


def the_weight_is_the_ratio(module: ModuleType) -> Outcome:
    """Differentiate the loss of one token on policy by its log-prob: the ratio 1, and ``epsilon`` with the bug."""
    import torch

    if "cispo" not in str(module.GRPOConfig.__dataclass_fields__.get("loss_type")):
        return absent("this release has no CISPO")

    def end(trainer: Any) -> None:
        raise StopConstruction

    model = tiny_causal_lm(SimpleNamespace(get_text_config=SimpleNamespace, _name_or_path="tiny"))
    model.warnings_issued, model.generation_config = {}, SimpleNamespace(eos_token_id=None)
    begun = begin_trainer(module, module.GRPOTrainer, model, parent=end, loss_type="cispo")
    log_prob = torch.zeros(1, 1, requires_grad=True)
    trainer = stub_grpo_trainer(module, log_prob, loss_type="cispo", beta=0.0, steps_per_generation=1)
    trainer.epsilon_high = begun.epsilon_high
    ids = torch.ones(1, 1, dtype=torch.long)
    inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
    inputs |= {"advantages": torch.ones(1), "num_items_in_batch": torch.tensor(1)}
    (gradient,) = torch.autograd.grad(trainer._compute_loss(None, inputs), log_prob)
    return judge(-float(gradient), right=1.0, wrong=0.2)
