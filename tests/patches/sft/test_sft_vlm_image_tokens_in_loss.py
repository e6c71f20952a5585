"""No label is a token of an image. The processor here names the character 2, and makes two tokens of each image."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

from trl_hotfix.testing import CharacterProcessor

import tiny

ID = "sft-vlm-image-tokens-in-loss"
IMAGES, TEXTS = ([7], [8, 9], []), ("\2a\1", "\2\2bc\1", "e\1")
IDS = [[2, 2, 97, 1, 0, 0, 0], [2, 2, 2, 2, 98, 99, 1], [101, 1, 0, 0, 0, 0, 0]]
LABELS = [[-100, -100, 97, 1, -100, -100, -100], [-100] * 4 + [98, 99, 1], [101, 1] + [-100] * 5]
WARNING = "sft-vlm-image-tokens-in-loss leaves the labels as they are: CharacterProcessor has no image_token_id"


def collator_of(processor: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return a collator. ``processor`` has attributes of its processor."""
    collator = sft_trainer.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)
    vars(collator.processor).update(processor or {})
    return collator


def texts() -> list[dict[str, Any]]:
    """Return rows with one image, two and none."""
    return [{"images": images, "text": text} for images, text in zip(IMAGES, TEXTS, strict=True)]


def conversation(*columns: str) -> dict[str, Any]:
    """Return a row with an image. Its two messages are in one column, or one is in each of two."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    parts = [turns] if len(columns) == 1 else [turns[:1], turns[1:]]
    return {"images": [7], **dict(zip(columns, parts, strict=True))}


def kinds_of_labels(batch: Any) -> set[int]:
    return set(batch["labels"].flatten().tolist()) - {-100}


def test_images_are_no_labels_in_any_row_of_each_batch() -> None:
    for collator in [collator_of() for _ in range(2)]:
        for _ in range(2):
            assert collator(texts())["labels"].tolist() == LABELS
        with torch.no_grad():
            assert collator.torch_call(examples=texts())["labels"].tolist() == LABELS


def test_all_but_the_labels_is_trls(switch: Any) -> None:
    patched = collator_of()(texts())
    with switch.off():
        unpatched = collator_of()(texts())
    assert unpatched["labels"].eq(2).sum() == 6
    assert patched.keys() == unpatched.keys()
    assert patched["input_ids"].tolist() == unpatched["input_ids"].tolist() == IDS
    assert patched["attention_mask"].equal(unpatched["attention_mask"])
    assert patched["pixel_values"] == unpatched["pixel_values"] == list(IMAGES)


def test_a_row_may_have_its_image_anywhere() -> None:
    rows = [{"images": [7], "text": "a\2b"}, {"images": [8], "text": "ab\2"}]
    assert collator_of()(rows)["labels"].tolist() == [[97, -100, -100, 98], [97, 98, -100, -100]]


def test_a_batch_is_masked_if_only_its_last_row_has_an_image() -> None:
    rows = [{"images": [], "text": "abc"}, {"images": [7], "text": "\2d"}]
    assert collator_of()(rows)["labels"].tolist() == [[97, 98, 99], [-100, -100, 100]]


@pytest.mark.parametrize("columns", [["messages"], ["prompt", "completion"]], ids=["messages", "pairs"])
def test_images_of_conversations_are_no_labels(columns: list[str]) -> None:
    # The character u begins what the user says, and the image comes before it.
    batch = collator_of()([conversation(*columns)])
    assert batch["labels"].tolist() == [[117, -100, -100, 97, 1, 97, 98, 1]]
    assert batch["input_ids"].tolist() == [[117, 2, 2, 97, 1, 97, 98, 1]]


def test_texts_that_are_cut_are_masked_too() -> None:
    assert collator_of(max_length=3)(texts())["labels"].tolist() == [[-100, -100, 97], [-100] * 3, [101, 1, -100]]


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({"image_ids": [2, 97]}, {1, 98, 99, 101}),
        ({"image_token_ids": [97, 98], "image_ids": None}, {1, 99, 101}),
        ({"image_ids": [97], "image_token_ids": [98]}, {1, 99, 101}),
        ({"image_token_id": None, "image_ids": [99]}, {1, 2, 97, 98, 101}),
        ({"image_token_id": None, "image_token_ids": [98, None]}, {1, 2, 97, 99, 101}),
        ({"image_token_id": 101, "image_ids": []}, {1, 2, 97, 98, 99}),
    ],
    ids=["before transformers 5", "in transformers 5", "both lists", "one list alone", "the other alone", "another id"],
)
def test_all_tokens_that_the_processor_names_are_no_labels(
    named: dict[str, Any], labels: set[int], messages: list[str]
) -> None:
    assert kinds_of_labels(collator_of(named)(texts())) == labels
    assert not messages


def test_the_token_with_the_id_0_may_be_that_of_images() -> None:
    # Here the padding has it too, which is no label anyhow.
    batch = collator_of({"image_token_id": 0})([{"images": [], "text": "a\0b"}])
    assert batch["labels"].tolist() == [[97, -100, 98]]


@pytest.mark.parametrize("batch", ["pairs", "texts without images"])
def test_labels_without_images_are_trls(batch: str, switch: Any) -> None:
    settings: Any
    settings, row = {
        "pairs": ({"completion_only_loss": True}, conversation("prompt", "completion")),
        "texts without images": ({}, {"images": [], "text": "ab\1"}),
    }[batch]
    collator = collator_of(**settings)
    with tiny.counted(ID) as counts:
        patched = collator([copy.deepcopy(row)])
        assert not counts().acted
    with switch.off():
        unpatched = collator_of(**settings)([row])
    assert patched["labels"].equal(unpatched["labels"])


def test_a_batch_with_images_counts() -> None:
    collator = collator_of()
    with tiny.counted(ID) as counts:
        collator(texts())
        collator(texts()[2:])
        collator(texts()[:1])
        assert counts().acted == 2


def test_an_unnamed_token_stays_a_label_and_each_trainer_is_warned_once(messages: list[str]) -> None:
    unnamed = {"image_token_id": None}
    with tiny.counted(ID) as counts:
        for number, collator in enumerate([collator_of(unnamed), collator_of(unnamed)], start=1):
            for _ in range(2):
                assert collator(texts())["labels"].eq(2).sum() == 6
                assert messages == [WARNING] * number
        assert not counts().acted
