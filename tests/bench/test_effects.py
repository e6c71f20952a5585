"""``TRL_HOTFIX_EFFECT`` on real trainers: it measures what two runs differ by, and changes no bit of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.proving.running import process
from bench.releases import layout

SECONDS = 300

CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("transformers-gradients-times-gas", "0.12.2", "DPO", {"ranks": 2}),
    ("transformers-gradients-times-gas", "0.16.1", "GRPO", {}),
    ("transformers-gradients-times-gas", "0.16.1", "KTO", {"accumulation": 4, "batch_size": 2}),
    ("gkd-prompt-slice-cuts-completions", "0.16.1", "GKD", {}),
    ("grpo-dapo-normaliser", "0.22.2", "GRPO", {"arguments": {"loss_type": "dapo", "steps_per_generation": 4}}),
    ("sft-label-smoothing-times-gas", "0.24.0", "SFT", {"arguments": {"label_smoothing_factor": 0.1}}),
    ("grpo-kl-metric-token-level", "0.24.0", "GRPO", {"arguments": {"beta": 0.1, "loss_type": "grpo"}}),
    ("neftune-noise-by-padded-length", "1.16.0", "SFT", {"arguments": {"neftune_noise_alpha": 5.0}}),
    ("gold-loss-normaliser-counts-dataset-labels", "1.16.0", "GOLD", {}),
    ("online-dpo-gradient-not-divided-by-gas", "1.16.0", "OnlineDPO", {}),
    ("online-dpo-metrics-include-padding", "1.16.0", "OnlineDPO", {}),
    ("orpo-nan-gradient-near-certainty", "1.16.0", "ORPO", {"adapter": "config"}),
)
"""A repair, a release, a trainer, and a setting in which it acts in a step."""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("patch_id", "release", "trainer", "setting"), CASES, ids=[f"{case[2]}-{case[0]}" for case in CASES]
)
def test_the_effect_is_what_two_runs_differ_by(
    patch_id: str, release: str, trainer: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    place = layout.main_place(release)
    layout.build([place])
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"patch": patch_id, "trainer": trainer, "setting": setting}))
    answer = process(place, ["-m", "bench.inside.effects", "{out}", str(case)], SECONDS)
    assert not isinstance(answer, str), answer
    assert answer["differ"] == []
    effect, expected = dict(answer["effect"]), answer["expected"]
    assert effect.pop("step") == 1
    # Before transformers 5 a log has four digits of the loss.
    approximately = {
        name: pytest.approx(value, rel=1e-6, abs=6e-5 * ("loss" in name)) for name, value in expected.items()
    }
    assert effect == approximately
