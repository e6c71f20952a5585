"""Where an argument of a config can be set."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "config",
    [
        "args = DPOConfig(precompute_ref_log_probs=not False)",
        "on = True\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "args = DPOConfig()\nargs.precompute_ref_log_probs = True",
        "args = DPOConfig(**{'precompute_ref_log_probs': True})",
        "options = dict(precompute_ref_log_probs=True)\nargs = DPOConfig(**options)",
        "args = DPOConfig(beta=1)\nargs = DPOConfig(precompute_ref_log_probs=True)",
        "@dataclass\nclass Mine(DPOConfig):\n    precompute_ref_log_probs: bool = True\nargs = Mine()",
        "first = DPOConfig(precompute_ref_log_probs=True)\nargs = first",
        "args, other = DPOConfig(precompute_ref_log_probs=True), 1",
    ],
)
def test_an_argument_is_followed_to_where_it_is_set(scan: Any, config: str) -> None:
    (trainer,) = scan(f"from trl import DPOConfig, DPOTrainer\n{config}\nDPOTrainer('gpt2', args=args)\n")
    assert trainer.hit_ids == {"dpo-precomputed-ref-logps-dropped"}
