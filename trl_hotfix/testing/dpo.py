"""Stand-ins for DPO's trainer and the others that compute ``get_batch_loss_metrics``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .trainers import default_arguments, stub_trainer


def dpo_stub(module: ModuleType, method: str = "DPO", **attributes: Any) -> Any:
    """Return a stub of this module's ``DPOTrainer`` on which ``get_batch_loss_metrics`` runs in any release to 0.28.

    ``method`` names another trainer with such a method (CPO, ORPO, KTO, BCO). The stub is for a text model without PEFT
    and without an auxiliary loss, padded with 0, unless ``attributes`` differ.
    """
    defaults: dict[str, Any] = {
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "is_vision_model": False,
        "is_peft_model": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "use_dpo_data_collator": True,
        "_peft_has_been_casted_to_bf16": False,
    }
    arguments = default_arguments(getattr(module, f"{method}Config"))
    return stub_trainer(getattr(module, f"{method}Trainer"), arguments, **{**defaults, **attributes})
