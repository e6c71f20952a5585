"""Which known bugs a trainer call hits, does not hit, or may hit."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import versions
from trl_hotfix.model import Hit, Patch, Severity, Upstream

PATCHES = loading.load()
DROPPED = "dpo-precomputed-ref-logps-dropped"


def test_a_hit_has_symptom_lines_and_conditions(scan: Any, dpo_script: str) -> None:
    (trainer,) = scan(dpo_script)
    (hit,) = trainer.hits
    assert (trainer.call.name, trainer.call.line) == ("DPO", 10)
    assert (hit.patch.id, hit.lines) == (DROPPED, (6, 9))
    assert hit.symptom.startswith("the loss stays at 0.6931")
    assert hit.because[:2] == ("precompute_ref_log_probs=True (line 9)", "ref_model is not given")
    assert hit.unknown == ()
    assert trainer.not_hit == len(PATCHES) - 1 - len(trainer.unsure)


@pytest.mark.parametrize(
    ("old", "new", "trl"),
    [
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=False", "0.12.2"),
        (", precompute_ref_log_probs=True", "", "0.12.2"),
        ("args=training_args", "args=training_args, peft_config=LoraConfig(r=8)", "0.12.2"),
        ("", "", "0.13.0"),
        ("", "", "0.11.4"),
    ],
)
def test_an_unmet_condition_is_no_hit(scan: Any, dpo_script: str, old: str, new: str, trl: str) -> None:
    text = f"    from peft import LoraConfig\n{dpo_script.replace(old, new)}"
    (trainer,) = scan(text, trl)
    assert DROPPED not in trainer.hit_ids | trainer.unknown.keys()


def test_each_way_into_a_bug_has_its_symptom(scan: Any, dpo_script: str) -> None:
    own_reference = "model=model, ref_model=AutoModelForCausalLM.from_pretrained('x'),"
    (trainer,) = scan(dpo_script.replace("model=model,", own_reference))
    (hit,) = trainer.hits
    assert "every step computes the reference again" in hit.symptom


def test_what_depends_on_the_model_cannot_be_told(scan: Any, dpo_script: str) -> None:
    (trainer,) = scan(dpo_script, "0.11.4")
    assert "if the model is a mixture of experts" in trainer.unknown["moe-aux-loss-lost-under-deepspeed"]


@pytest.mark.parametrize(
    ("trl", "answer"),
    [
        ("0.13.0.dev0", "cannot tell"),
        ("0.12.0.dev0", "cannot tell"),
        ("0.12.3.dev0", "hit"),
        ("0.14.0.dev0", "not hit"),
    ],
)
def test_a_development_version_at_a_limit_cannot_be_told(scan: Any, dpo_script: str, trl: str, answer: str) -> None:
    (trainer,) = scan(dpo_script, trl)
    assert _answer(trainer, DROPPED) == answer
    if answer == "cannot tell":
        assert f"TRL {trl} is no release" in trainer.unknown[DROPPED]


@pytest.mark.parametrize(
    ("transformers", "other_release", "answer"),
    [("4.50.0", False, "hit"), ("4.44.0", False, "not hit"), ("4.44.0", True, "cannot tell")],
)
def test_requirements_decide_on_the_installed_release(
    scan: Any, monkeypatch: pytest.MonkeyPatch, transformers: str, other_release: bool, answer: str
) -> None:
    name = "sft-loss-normaliser-counts-first-token"
    monkeypatch.setattr(versions, "installed", lambda distribution: transformers)
    (trainer,) = scan("from trl import SFTTrainer\nSFTTrainer('gpt2')\n", "1.0.0", other_release=other_release)
    assert _answer(trainer, name) == answer
    if answer == "cannot tell":
        assert trainer.unknown[name] == (
            "needs transformers >=4.46.0,<5.10.1, and its version is not known (4.44.0 is installed here)"
        )


def _answer(trainer: Any, patch_id: str) -> str:
    if patch_id in trainer.hit_ids:
        return "hit"
    return "cannot tell" if patch_id in trainer.unknown else "not hit"


def test_a_patch_without_conditions_cannot_be_told(scan: Any) -> None:
    patch = Patch("p/x", 1, "A bug", Severity.CRASH, ">=0.9.6", Upstream(), "", "", (), "")
    (trainer,) = scan("import trl\ntrl.SFTTrainer('gpt2')\n", "1.0.0", patches=[patch])
    assert trainer.unknown == {"p/x": "the patch does not say what its bug needs"}


def test_the_most_severe_hit_comes_first(scan: Any) -> None:
    (trainer,) = scan("from trl import OnlineDPOTrainer\nOnlineDPOTrainer('x', args=None)\n", "1.0.0")
    ranks = [list(Severity).index(finding.patch.severity) for finding in trainer.hits]
    assert ranks == sorted(ranks)


def test_every_patch_declares_trainers_and_symptoms() -> None:
    for patch in PATCHES:
        assert patch.hits, patch.id
        for hit in patch.hits:
            assert isinstance(hit, Hit)
            assert hit.trainers
            assert hit.symptom
