from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch
from trl_hotfix.scanning.hits import ScannedTrainer, judge
from trl_hotfix.scanning.scripts import read

PATCHES = loading.load()


class Scanned(ScannedTrainer):
    """A scanned trainer, by the ids of the patches."""

    @property
    def hit_ids(self) -> set[str]:
        return {finding.patch.id for finding in self.hits}

    @property
    def unknown(self) -> dict[str, str]:
        """What scan cannot tell, by the id of the patch."""
        return {finding.patch.id: "; ".join(finding.unknown) for finding in self.unsure}


@pytest.fixture
def scan(tmp_path: Path) -> Any:
    """Write a script, and judge its trainers on a release."""

    def scan_text(
        text: str,
        trl: str = "0.12.2",
        name: str = "train.py",
        trainer: str | None = None,
        patches: Iterable[Patch] = PATCHES,
        other_release: bool = False,
    ) -> list[Scanned]:
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        judged = [judge(call, patches, trl, other_release=other_release) for call in read(file, trainer).calls]
        return [Scanned(trainer.call, trainer.hits, trainer.unsure, trainer.not_hit) for trainer in judged]

    return scan_text


@pytest.fixture
def dpo_script() -> str:
    """A script that hits ``dpo-precomputed-ref-logps-dropped``."""
    return """\
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B")
    dataset = load_dataset("trl-lib/ultrafeedback_binarized")
    training_args = DPOConfig(output_dir="out", precompute_ref_log_probs=True)
    trainer = DPOTrainer(
        model=model, args=training_args, train_dataset=dataset["train"], processing_class=tokenizer
    )
    trainer.train()
    """
