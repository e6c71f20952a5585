"""Train two steps of two micro-batches on images with the real DPOTrainer, and evaluate: Llava and Idefics3.

Losses and gradients are compared with DPO's formula on the images of the rows, and on none.
"""

from __future__ import annotations

from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import dpo_steps, vision_dpo
from tiny.grpo_steps import several_runs

ID = "dpo-vlm-pixel-values-dropped"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer._set_signature_columns_if_needed"

OVERLAYS = ()
PARITY = True
DATA = False
VARIANTS = "the columns are kept before a batch is made, outside of the model and whatever part of it is trained"

IDEFICS = {"make": vision_dpo.tiny_idefics, "features": vision_dpo.pixels_with_mask, "expanded": "<image> <image>"}


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer

    if "_set_signature_columns_if_needed" not in vars(DPOTrainer):
        return tiny.TrainingResult(absent("no column of images is removed"))
    run, messages = tiny.warnings_of(vision_dpo.vision_dpo)
    outcome = judged(run)
    if hasattr(DPOTrainer, "process_row"):
        assert judged(vision_dpo.vision_dpo(**IDEFICS)).verdict is outcome.verdict
    if trl_hotfix.status()[ID].state.value == "applied":
        assert tiny.acts(ID, TARGET, run.trainer) == 1
        (message,) = messages
        assert "max_prompt_length=24, max_length=48" in message
        check_other_ways()
        check_all_columns(run)
    return tiny.TrainingResult(outcome, run.first_step.loss, run.first_step.gradients)


def judged(run: vision_dpo.VisionSteps) -> Any:
    """Judge the first loss. All losses and gradients must be of its kind, and the vision tower learns from images."""
    first = run.micro_batches[0]
    outcome = judge(first.loss, right=first.expected["right"], wrong=first.expected["wrong"])
    of_kind = {Verdict.FIXED: "right", Verdict.REPRODUCED: "wrong"}
    differences = {verdict: run.difference(kind) for verdict, kind in of_kind.items()}
    assert differences.pop(outcome.verdict) < 1e-5, (outcome, differences)
    assert min(differences.values()) > 1e-2, differences
    assert len(run.gradients) == 2
    assert len(run.micro_batches) >= 6, "four micro-batches of the training, and two of the evaluation"
    assert all(bool(gradient) == (outcome.verdict is Verdict.FIXED) for gradient in run.of_images())
    return outcome


def check_other_ways() -> None:
    """Train with a precomputed reference, after an evaluation, and with a worker that collates."""
    ways: dict[str, dict[str, Any]] = {
        "precomputed": {"precompute_ref_log_probs": True},
        "evaluated before": {"prepare": lambda trainer: trainer.evaluate()},
        "a worker": {"dataloader_num_workers": 1},
    }
    for name, way in ways.items():
        run, messages = tiny.warnings_of(
            lambda way=way: vision_dpo.vision_dpo(max_prompt_length=None, max_length=None, **way)
        )
        assert judged(run).verdict is Verdict.FIXED, name
        assert messages == [], name


def check_all_columns(run: vision_dpo.VisionSteps) -> None:
    """Train with all columns: that is the same run, bit by bit."""
    other = vision_dpo.vision_dpo(remove_unused_columns=False)
    assert not tiny.acts(ID, TARGET, other.trainer)
    assert [part.loss for part in other.micro_batches] == [part.loss for part in run.micro_batches]
    for gradients, same in zip(other.gradients, run.gradients, strict=True):
        assert all(bool((gradients[name] == value).all()) for name, value in same.items())


def unaffected() -> tiny.TrainingResult:
    """Train on texts beside a column of that name, with all columns, with a collator of the user's, and Qwen2-VL."""
    from trl.trainer import dpo_trainer

    own = getattr(dpo_trainer, "DataCollatorForPreference", None) or dpo_trainer.PreferenceCollator

    def collate(examples: list[dict[str, Any]]) -> Any:
        assert all("pixel_values" not in example for example in examples)
        return own(pad_token_id=0)(examples)

    texts = vision_dpo.rows(ends=False, images=False)
    texts = texts.add_column("pixel_values", [[0.5, index] for index in range(len(texts))])
    formula = dpo_steps.reference_or_policy
    blind, messages = tiny.warnings_of(
        lambda: {
            "the user's": vision_dpo.vision_dpo(data_collator=collate),
            "Qwen2-VL": vision_dpo.vision_dpo(vision_dpo.tiny_qwen, with_formula=False),
            "an adapter on it": vision_dpo.vision_dpo(vision_dpo.tiny_qwen, adapter=True, with_formula=False),
        }
    )
    if trl_hotfix.status()[ID].state.value == "applied":
        named = ("which is not TRL's", "Qwen2VLForConditionalGeneration", "Qwen2VLForConditionalGeneration")
        assert all(name in message for name, message in zip(named, messages, strict=True)), messages
    runs = {
        "texts": dpo_steps.dpo_steps(formula, reference=1, train_dataset=texts, words=tiny.tokenizer()),
        "all columns": vision_dpo.vision_dpo(remove_unused_columns=False),
        **blind,
    }
    assert not any(tiny.acts(ID, TARGET, run.trainer) for run in runs.values())
    return several_runs(runs, absent("whom it does not hit"))
