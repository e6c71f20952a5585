"""A trainer is found under any name, also that of a derived class."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("imported", "trainer", "config"),
    [
        ("from trl import DPOTrainer as T, DPOConfig as C", "T", "C"),
        ("import trl", "trl.DPOTrainer", "trl.DPOConfig"),
        ("import trl as t", "t.trainer.DPOTrainer", "t.DPOConfig"),
        ("import trl.trainer.dpo_trainer", "trl.trainer.dpo_trainer.DPOTrainer", "trl.DPOConfig"),
        ("from trl.trainer import dpo_trainer as d, DPOConfig", "d.DPOTrainer", "DPOConfig"),
        (
            "from trl.experimental.bema_for_ref_model import DPOTrainer\nfrom trl import DPOConfig",
            "DPOTrainer",
            "DPOConfig",
        ),
        ("import trl\nT = trl.DPOTrainer\nC = trl.DPOConfig", "T", "C"),
        (
            "try:\n    from trl import A\nexcept ImportError:\n    A = None\nfrom trl import *",
            "trl.DPOTrainer",
            "trl.C",
        ),
        (
            "from trl import DPOTrainer, DPOConfig\nclass Mine(DPOTrainer):\n    pass\nclass Ours(Mine): ...",
            "Ours",
            "DPOConfig",
        ),
    ],
)
def test_a_trainer_is_found_under_every_name(scan: Any, imported: str, trainer: str, config: str) -> None:
    if "import *" in imported:
        imported, config = "import trl", "trl.DPOConfig"
    (scanned,) = scan(f"{imported}\nt = {trainer}('gpt2', args={config}(precompute_ref_log_probs=True))\n")
    assert scanned.hit_ids == {"dpo-precomputed-ref-logps-dropped"}
    assert (scanned.call.name, scanned.call.called) == (
        "DPO",
        trainer.rpartition(".")[2] if trainer != "T" else scanned.call.called,
    )


def test_trainers_of_other_packages_are_not_scanned(scan: Any) -> None:
    assert scan("from mine import DPOTrainer\nfrom transformers import Trainer\nDPOTrainer('x')\nTrainer('x')\n") == []
