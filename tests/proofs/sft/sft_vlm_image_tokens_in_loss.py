"""The proof: two optimizer steps of the real SFTTrainer and an evaluation, on messages and on pairs with images.

The expected losses and accumulated gradients are those of ids and labels that are written down here, by cross-entropy
without TRL's code; the wrong ones have the image tokens among the labels, and are divided by them too.
"""

from __future__ import annotations

from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny
from tiny import vision

ID = "sft-vlm-image-tokens-in-loss"

OVERLAYS = ()
PARITY = False
VARIANTS = "the labels are made by the collator, outside of the model and whatever part of it is trained"

# Rows have none to two images, and questions and answers of several lengths.
IMAGES = [[[0.1 * index, 0.5, -0.3], [0.2, 0.1 * index, 0.4]][: index % 3] for index in range(8)]
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]
ANSWERS = [f"w{20 + index}" + " w30" * (index % 2) for index in range(8)]


def rows(kind: str) -> list[dict[str, Any]]:
    made = []
    for images, question, answer in zip(IMAGES, QUESTIONS, ANSWERS, strict=True):
        user, assistant = [{"role": "user", "content": question}], [{"role": "assistant", "content": answer}]
        columns = {"messages": user + assistant} if kind == "messages" else {"prompt": user, "completion": assistant}
        made.append({"images": images, **columns})
    return made


def by_hand(*, images_are_labels: bool) -> vision.Expected:
    """Return what makes the expected batches, in which all other tokens are labels."""
    texts = {}
    for index, (images, question, answer) in enumerate(zip(IMAGES, QUESTIONS, ANSWERS, strict=True)):
        texts[f"w{index}"] = ("", f"w58 {'<image> ' * len(images)} {question} <eos> w59 {answer} <eos>")
    with_images = vision.rows_by_word(texts)

    def without_images(batch: vision.Batch) -> vision.Batch:
        expected = with_images(batch)
        return {**expected, "labels": expected["labels"].masked_fill(expected["input_ids"] == 63, -100)}

    return with_images if images_are_labels else without_images


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not hasattr(sft_trainer, "DataCollatorForVisionLanguageModeling"):
        return tiny.TrainingResult(absent("this release has no collator of images"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    runs = {
        "messages": vision.vision_sft(rows("messages")),
        "pairs": vision.vision_sft(rows("pairs"), completion_only_loss=False),
    }
    for name, run in runs.items():
        assert vision.difference_from_labels(run, by_hand(images_are_labels=not patched)) < 1e-5, name
        assert vision.difference_from_labels(run, by_hand(images_are_labels=patched)) > 1e-2, name
    first = runs["messages"].steps[0]
    right, wrong = (vision.loss_of_step(first, by_hand(images_are_labels=labels)) for labels in (False, True))
    outcome = judge(sum(call.loss for call in first.micro_batches), right=right, wrong=wrong)
    return tiny.TrainingResult(outcome, *vision.everything(runs["messages"]))


def unaffected() -> tiny.TrainingResult:
    """Train on completions alone, on messages without an image, and with a processor that names no image token."""
    unnamed = vision.processor()
    unnamed.image_token_id = None
    runs = {
        "pairs": vision.vision_sft(rows("pairs")),
        "no image": vision.vision_sft([{**row, "images": []} for row in rows("messages")]),
        "unnamed": vision.vision_sft(rows("messages"), words=unnamed),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *vision.all_of(runs))
