"""A script for ``check``: a tiny DPO run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl import DPOConfig, DPOTrainer

import tiny

with tempfile.TemporaryDirectory() as models:
    policy, reference = (tiny.llama(models, seed=seed) for seed in (0, 1))
trainer = tiny.trainer(
    DPOTrainer,
    model=policy,
    ref_model=reference,
    args=tiny.config(DPOConfig, max_length=16, max_prompt_length=8, output_dir="out"),
    train_dataset=tiny.preferences(),
    tokenizer=tiny.tokenizer(),
)
trainer.train()
