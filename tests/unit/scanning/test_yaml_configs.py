"""A config of TRL's command line."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.errors import ScriptError

DROPPED = "dpo-precomputed-ref-logps-dropped"


def test_the_keys_of_a_config_tell_its_trainer(scan: Any) -> None:
    text = "model_name_or_path: gpt2\npacking: true\ngradient_accumulation_steps: 8\n"
    (trainer,) = scan(text, "0.20.0", "sft.yaml")
    assert (trainer.call.name, trainer.call.called) == ("SFT", "trl sft")
    (hit,) = (finding for finding in trainer.hits if finding.patch.id == "sft-padding-free-contamination")
    assert hit.lines == (2,)


def test_a_config_is_scanned_for_the_named_trainer(scan: Any) -> None:
    text = "model_name_or_path: gpt2\nprecompute_ref_log_probs: true\nuse_peft: false\n"
    with pytest.raises(ScriptError, match="its keys do not tell the trainer; name it, as in --trainer DPO"):
        scan(text, "0.12.2", "x.yaml")
    (trainer,) = scan(text, "0.12.2", "x.yaml", "DPO")
    assert "made by trl dpo, whose script is not in this file" in trainer.unknown[DROPPED]
    (trainer,) = scan(text.replace("false", "true"), "0.12.2", "x.yml", "DPO")
    assert DROPPED not in trainer.hit_ids


@pytest.mark.parametrize(("value", "hit"), [('"true"', None), ("'Yes'", None), ("true", True), ('"false"', False)])
def test_a_text_may_be_the_truth_value_that_the_parser_makes_of_it(scan: Any, value: str, hit: bool | None) -> None:
    (trainer,) = scan(f"packing: {value}\n", "0.20.0", "sft.yaml")
    bug = "sft-padding-free-contamination"
    assert (bug in trainer.hit_ids, bug in trainer.unknown) == (hit is True, hit is None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("packing: true\nrpo_alpha: 1\n", "keys of several trainers (packing of SFT; rpo_alpha of DPO)"),
        ("- a\n", "expected a config of TRL's command line"),
        ("", "expected a config of TRL's command line"),
        ("a: [\n", "line 2 is not YAML"),
        ("a: !!python/name:os.system x\n", "is not YAML"),
        ("a: 2026-02-31\n", "is not YAML"),
    ],
)
def test_an_invalid_config_is_one_clear_error(scan: Any, text: str, message: str) -> None:
    with pytest.raises(ScriptError) as caught:
        scan(text, "0.12.2", "x.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
