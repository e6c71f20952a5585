"""The columns of images are kept where TRL's collator reads them and the model can take them, and nowhere else."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.patches import dpo_vlm_pixel_values_dropped as patch

LISTED = ["prompt_input_ids", "image_sizes"]
KEPT = [*LISTED, "pixel_values", "pixel_attention_mask"]


class DataCollatorForPreference:
    """A collator with the name of TRL's, which this module has like that of DPO."""


class Extended(DataCollatorForPreference):
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


def a_trainer(**attributes: Any) -> Any:
    usual = {"is_vision_model": True, "data_collator": DataCollatorForPreference(), "model": Llava()}
    args = SimpleNamespace(max_prompt_length=None, max_length=None)
    return SimpleNamespace(**{**usual, "_signature_columns": None, "args": args, **attributes})


def ask(trainer: Any) -> list[str]:
    """Ask the trainer for its columns, as for its training and its evaluation set."""

    def list_the_columns() -> str:
        if trainer._signature_columns is None:
            trainer._signature_columns = list(LISTED)
        return "listed"

    for _ in range(2):
        assert patch.keep_the_images(list_the_columns, trainer, (), {}) == "listed"
    columns: list[str] = trainer._signature_columns
    return columns


@pytest.mark.parametrize("collator", [DataCollatorForPreference(), Extended()])
@pytest.mark.parametrize("model", [Llava(), Adapted(Llava())])
def test_the_columns_are_kept_once(collator: Any, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(data_collator=collator, model=model)) == KEPT
    assert caplog.records == []


def test_the_collator_of_0_12_is_known_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = a_trainer(), sys.modules[__name__]
    monkeypatch.setattr(module, "PreferenceCollator", DataCollatorForPreference, raising=False)
    monkeypatch.delattr(module, "DataCollatorForPreference")
    assert ask(trainer) == KEPT


def test_a_text_model_keeps_its_columns(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(is_vision_model=False, data_collator=Own(), model=Qwen())) == LISTED
    assert caplog.records == []


def test_columns_that_are_listed_already_stay(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(_signature_columns=["prompt"], data_collator=Own())) == ["prompt"]
    assert caplog.records == []


def test_a_collator_of_the_users_gets_no_more_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(data_collator=Own())) == LISTED
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the data collator, which is not TRL's" in record.getMessage()
    assert "remove_unused_columns=False" in record.getMessage()


@pytest.mark.parametrize("model", [Qwen(), Adapted(Qwen())])
def test_a_model_that_needs_more_gets_none_and_one_warning(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(model=model)) == LISTED
    (record,) = caplog.records
    assert "without the images of its dataset: Qwen needs image_grid_thw" in record.getMessage()


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_prompt_length": 512, "max_length": 1024}, "max_prompt_length=512, max_length=1024"),
        ({"max_prompt_length": None, "max_length": 1024}, "(max_length=1024)"),
        ({"max_prompt_length": 512, "max_length": None}, "(max_prompt_length=512)"),
    ],
)
def test_what_cuts_a_row_is_named(limits: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(a_trainer(args=SimpleNamespace(**limits))) == KEPT
    (record,) = caplog.records
    assert named in record.getMessage()
