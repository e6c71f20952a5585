"""What PEFT's soft prompts do to a batch."""

from __future__ import annotations

from typing import Any


def virtual_tokens_come_first(model: Any) -> bool:
    """Return whether PEFT puts embeddings of virtual tokens before each row, which predict its first token.

    Prefix tuning puts its virtual tokens into the cache, and they predict nothing.
    """
    config = getattr(model, "active_peft_config", None)
    return config is not None and config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"
