"""The proof: two optimizer steps of the real SFTTrainer and an evaluation, on images with prompts and completions.

The expected losses and accumulated gradients are those of ids and labels that are written down here, by cross-entropy
without TRL's code; the wrong ones are those without the ends.
"""

from __future__ import annotations

from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny
from tiny import vision

ID = "sft-vlm-standard-format-no-eos"

OVERLAYS = ()
PARITY = False
VARIANTS = "the tokens are made by the collator, outside of the model and whatever part of it is trained"

IMAGES = [[0.1 * index, 0.5, -0.3] for index in range(8)]
# Prompts and completions have several lengths, two completions end already, and one row has no image.
PROMPTS = [f"w{index} <image>" + " w9" * (index % 3) for index in range(7)] + ["w7 w9"]
COMPLETIONS = [f" w{20 + index}" + " w30" * (index % 4) + (" <eos>" if index in (2, 5) else "") for index in range(8)]
PAIRS = [
    {"images": [image] if "<image>" in prompt else [], "prompt": prompt, "completion": completion}
    for image, prompt, completion in zip(IMAGES, PROMPTS, COMPLETIONS, strict=True)
]
TEXTS = [{"images": row["images"], "text": row["prompt"] + row["completion"]} for row in PAIRS]


def by_hand(*, ends: bool, prompts: bool) -> vision.Expected:
    """Return what makes the expected batches, with or without the ends, and with or without labels of the prompts."""
    texts = {}
    for index, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        end = completion if completion.endswith("<eos>") or not ends else f"{completion} <eos>"
        texts[f"w{index}"] = ("", prompt + end) if prompts else (prompt, end)
    return vision.rows_by_word(texts)


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not hasattr(sft_trainer, "DataCollatorForVisionLanguageModeling"):
        return tiny.TrainingResult(absent("this release has no collator of images"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    # TRL drops the column of texts, unless it is told not to.
    runs = {
        "pairs": (vision.vision_sft(PAIRS), False),
        "texts": (vision.vision_sft(TEXTS, remove_unused_columns=False), True),
        "pairs, prompts too": (vision.vision_sft(PAIRS, completion_only_loss=False), True),
    }
    for name, (run, prompts) in runs.items():
        difference = vision.difference_from_labels(run, by_hand(ends=patched, prompts=prompts))
        assert difference < 1e-5, (name, difference)
        assert vision.difference_from_labels(run, by_hand(ends=not patched, prompts=prompts)) > 1e-3, name
    pairs, _ = runs["pairs"]
    first = pairs.steps[0]
    right, wrong = (vision.loss_of_step(first, by_hand(ends=ends, prompts=False)) for ends in (True, False))
    outcome = judge(sum(call.loss for call in first.micro_batches), right=right, wrong=wrong)
    return tiny.TrainingResult(outcome, *vision.everything(pairs))


def unaffected() -> tiny.TrainingResult:
    """Train on what ends, on conversations of both kinds, and without images."""
    ended = [{**row, "completion": row["completion"].removesuffix(" <eos>") + " <eos>"} for row in PAIRS]

    def message(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    conversations = [
        {"images": [image], "prompt": [message("user", f"w{index}")], "completion": [message("assistant", "w3 w4")]}
        for index, image in enumerate(IMAGES)
    ]
    messages = [{"images": row["images"], "messages": row["prompt"] + row["completion"]} for row in conversations]
    runs: dict[str, Any] = {
        "ended": vision.vision_sft(ended),
        "conversations": vision.vision_sft(conversations),
        "messages": vision.vision_sft(messages),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *vision.all_of(runs))
