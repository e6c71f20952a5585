"""The columns of images are kept where TRL's collator reads them and the model can take them, and nowhere else."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import dpo_stub

COLUMNS = ["pixel_values", "pixel_attention_mask"]
# 0.12 has the collator under its first name.
Collator: Any = getattr(dpo_trainer, "DataCollatorForPreference", None) or dpo_trainer.PreferenceCollator


class Extended(Collator):  # type: ignore[misc]
    """A user's collator that extends TRL's."""


class Own:
    """A user's collator."""


class Llava:
    def forward(self, input_ids: Any, pixel_values: Any = None) -> None: ...


class Qwen:
    def forward(self, input_ids: Any, pixel_values: Any = None, image_grid_thw: Any = None) -> None: ...


class Adapted:
    """A PeftModel, whose forward takes any keywords."""

    def __init__(self, base: Any) -> None:
        self.get_base_model = lambda: base

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def trainer_of(*, max_prompt_length: int | None = None, max_length: int | None = None, **attributes: Any) -> Any:
    usual = {"is_vision_model": True, "data_collator": Collator(pad_token_id=0), "model": Llava()}
    trainer = dpo_stub(dpo_trainer, **{**usual, "_signature_columns": None, **attributes})
    trainer.args.max_prompt_length, trainer.args.max_length = max_prompt_length, max_length
    return trainer


def columns_of(trainer: Any) -> list[str]:
    """Ask the trainer for its columns, as for its training and its evaluation set."""
    for _ in range(2):
        assert trainer._set_signature_columns_if_needed() is None
    columns: list[str] = trainer._signature_columns
    return columns


@pytest.fixture
def listed(switch: Any) -> list[str]:
    """Return the columns that TRL lists."""
    with switch.off():
        columns = columns_of(trainer_of())
    assert not set(COLUMNS) & set(columns)
    return columns


@pytest.mark.parametrize("collator", [Collator(pad_token_id=0), Extended(pad_token_id=0)], ids=["TRL's", "extended"])
@pytest.mark.parametrize("model", [Llava(), Adapted(Llava())], ids=["plain", "adapted"])
def test_the_columns_are_kept_once(
    collator: Any, model: Any, listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert columns_of(trainer_of(data_collator=collator, model=model)) == listed + COLUMNS
    assert not caplog.records


def test_each_trainer_lists_them_for_itself(listed: list[str]) -> None:
    trainer = trainer_of()
    copied = copy.copy(trainer)
    assert columns_of(trainer) == columns_of(copied) == columns_of(trainer_of()) == listed + COLUMNS


def test_the_pixels_of_each_row_are_in_the_batch() -> None:
    trainer = trainer_of()
    columns = columns_of(trainer)
    row = {f"{name}_input_ids": [1, 2] for name in ("prompt", "chosen", "rejected")}
    images = (
        {"pixel_values": [[[2.0, 3.0]]], "pixel_attention_mask": [[1, 0]]},
        {
            "pixel_values": [[[5.0, 7.0]]],
            "pixel_attention_mask": [[1, 1]],
        },
    )
    rows = [{name: value for name, value in {**row, **image}.items() if name in columns} for image in images]
    batch = trainer.data_collator(rows)
    for name in COLUMNS:
        torch.testing.assert_close(batch[name], torch.tensor([image[name] for image in images]))


def test_a_text_model_keeps_its_columns(listed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert columns_of(trainer_of(is_vision_model=False, data_collator=Own(), model=Qwen())) == listed
    assert not caplog.records


def test_columns_that_are_listed_already_stay(caplog: pytest.LogCaptureFixture) -> None:
    assert columns_of(trainer_of(_signature_columns=["prompt"], data_collator=Own())) == ["prompt"]
    assert not caplog.records


def test_a_collator_of_the_users_gets_no_more_and_one_warning(
    listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert columns_of(trainer_of(data_collator=Own(), max_length=1024)) == listed
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the data collator, which is not TRL's" in record.getMessage()
    assert "remove_unused_columns=False" in record.getMessage()


@pytest.mark.parametrize("model", [Qwen(), Adapted(Qwen())], ids=["plain", "adapted"])
def test_a_model_that_needs_more_gets_none_and_one_warning(
    model: Any, listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert columns_of(trainer_of(model=model)) == listed
    (record,) = caplog.records
    assert "without the images of its dataset: Qwen needs image_grid_thw" in record.getMessage()


@pytest.mark.parametrize("needed", ["aspect_ratio_ids", "high_res_pixel_values", "image_grid_thw", "spatial_shapes"])
def test_what_a_model_needs_and_never_gets_is_named(
    needed: str, listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = Llava()
    names = ("input_ids", "pixel_values", needed)
    model.forward = lambda **kwargs: None  # type: ignore[method-assign]
    model.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    assert columns_of(trainer_of(model=model)) == listed
    assert f"Llava needs {needed} with them" in caplog.text


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_prompt_length": 512, "max_length": 1024}, "(max_prompt_length=512, max_length=1024)"),
        ({"max_length": 1024}, "(max_length=1024)"),
        ({"max_prompt_length": 512}, "(max_prompt_length=512)"),
    ],
    ids=["both", "max_length", "max_prompt_length"],
)
def test_what_cuts_a_row_is_named(
    limits: dict[str, Any], named: str, listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert columns_of(trainer_of(**limits)) == listed + COLUMNS
    (record,) = caplog.records
    assert named in record.getMessage()
