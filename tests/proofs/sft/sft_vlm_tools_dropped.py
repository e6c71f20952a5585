"""The proof: two optimizer steps of the real SFTTrainer and an evaluation, on conversations about images with tools.

The expected losses and accumulated gradients are those of ids and labels that are written down here, by cross-entropy
without TRL's code and without a chat template; the wrong ones are those without the tools.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import transformers
from packaging.version import Version

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny
from tiny import vision

ID = "sft-vlm-tools-dropped"

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"_rendering_with: `first = options[0]` -> `first = options[ -1]`": "all are equal if they equal the last"}
VARIANTS = "the tokens are made by the collator, outside of the model and whatever part of it is trained"

TARGET = "trl.trainer.sft_trainer:SFTTrainer._set_signature_columns_if_needed"
# Rows have none to three tools; two rows have a style, and two no image.
NAMES = [[f"w{40 + number}" for number in range(index % 4)] for index in range(8)]
STYLES = ["w56" if index in (3, 4) else "" for index in range(8)]
IMAGES = [[[0.1 * index, 0.5, -0.3]] if index % 4 else [] for index in range(8)]
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]
ANSWERS = [f"w{20 + index}" + " w30" * (index % 2) for index in range(8)]


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def rows(kind: str, *, equal: bool = False, with_options: bool = True) -> list[dict[str, Any]]:
    """Return messages with tools, or pairs with tools as JSON. ``equal``: all have the same tools and style."""
    made = []
    for index, (images, question, answer) in enumerate(zip(IMAGES, QUESTIONS, ANSWERS, strict=True)):
        user, assistant = [message("user", question)], [message("assistant", answer)]
        columns = {"messages": user + assistant} if kind == "messages" else {"prompt": user, "completion": assistant}
        names, style = (NAMES[3], STYLES[3]) if equal else (NAMES[index], STYLES[index])
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        options = {
            "tools": tools if kind == "messages" else json.dumps(tools),
            "chat_template_kwargs": {"style": style} if style else None,
        }
        made.append({"images": images, **columns, **(options if with_options else {})})
    return made


def by_hand(kind: str, *, tools: bool, equal: bool = False) -> vision.Expected:
    """Return what makes the expected batches of ``rows(kind)``."""
    texts = {}
    for index, (images, question, answer) in enumerate(zip(IMAGES, QUESTIONS, ANSWERS, strict=True)):
        names, style = (NAMES[3], STYLES[3]) if equal else (NAMES[index], STYLES[index])
        shown = " ".join([f"w57 {name}" for name in names] + [style]) if tools else ""
        before = f"{shown} w58 {'<image>' if images else ''} {question} <eos> w59 "
        texts[f"w{index}"] = ("", before + f"{answer} <eos>") if kind == "messages" else (before, f"{answer} <eos>")
    return vision.rows_by_word(texts)


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not hasattr(sft_trainer, "DataCollatorForVisionLanguageModeling"):
        return tiny.TrainingResult(absent("this release has no collator of images"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    runs: dict[str, Any] = {}
    for kind in ("messages", "pairs"):
        for equal in (False, True):
            run = runs[f"{kind}, equal" if equal else kind] = vision.vision_sft(rows(kind, equal=equal))
            difference = vision.difference_from_labels(run, by_hand(kind, tools=patched, equal=equal))
            assert difference < 1e-5, (kind, equal, difference)
            assert vision.difference_from_labels(run, by_hand(kind, tools=not patched, equal=equal)) > 1e-3
            if patched:
                assert tiny.acts(ID, TARGET, run) == 1
    check_labels_of_the_assistant(patched)
    if patched:
        without = vision.vision_sft(rows("messages", with_options=False))
        assert tiny.acts(ID, TARGET, without) == 0
    first = runs["pairs"].steps[0]
    right, wrong = (vision.loss_of_step(first, by_hand("pairs", tools=tools)) for tools in (True, False))
    outcome = judge(sum(call.loss for call in first.micro_batches), right=right, wrong=wrong)
    return tiny.TrainingResult(outcome, *vision.everything(runs["messages"]))


def check_labels_of_the_assistant(patched: bool) -> None:
    """Train with ``assistant_only_loss``, which TRL has for images from 1.15.0 and transformers 5.18 on."""
    from trl.trainer import sft_trainer

    fields = {field.name for field in dataclasses.fields(sft_trainer.DataCollatorForVisionLanguageModeling)}
    if "assistant_only_loss" not in fields or Version(transformers.__version__) < Version("5.18"):
        return
    for equal in (False, True):
        run = vision.vision_sft(rows("messages", equal=equal), assistant_only_loss=True)
        assert vision.difference_from_labels(run, by_hand("pairs", tools=patched, equal=equal)) < 1e-5


def unaffected() -> tiny.TrainingResult:
    """Train on conversations without tools, on plain texts with tools, and on conversations whose tools are none."""
    plain = [
        {"images": row["images"], "prompt": f"{'<image>' if row['images'] else ''} w1", "completion": " w2 w3 <eos>"}
        for row in rows("pairs")
    ]
    runs = {
        "messages": vision.vision_sft(rows("messages", with_options=False)),
        "pairs": vision.vision_sft(rows("pairs", with_options=False)),
        "plain": vision.vision_sft(plain),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *vision.all_of(runs))
