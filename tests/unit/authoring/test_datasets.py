"""Whether prompts of messages are kept out of the loss, by the first row of a dataset and by the config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.authoring import masks_prompts_of_messages
from trl_hotfix.testing import messages, only_iterable

CONVERSATION = {"prompt": messages("ub"), "completion": messages("ac")}


def prepare(dataset: Any, processing_class: Any, args: Any) -> None:
    """Have the arguments of ``_prepare_dataset`` that are read."""


@pytest.mark.parametrize(
    ("row", "completion_only_loss", "expected"),
    [
        (CONVERSATION, None, True),
        (CONVERSATION, True, True),
        (CONVERSATION, False, False),
        ({**CONVERSATION, "input_ids": [97]}, None, False),
        ({"prompt": "a", "completion": "b"}, None, False),
        ({"messages": messages("ub", "ac")}, None, False),
    ],
)
def test_prompts_of_messages_are_masked(row: dict[str, Any], completion_only_loss: bool | None, expected: bool) -> None:
    settings = SimpleNamespace(completion_only_loss=completion_only_loss)
    call = (only_iterable(row), "tokenizer"), {"args": settings}
    assert masks_prompts_of_messages(prepare, *call) is expected


def test_what_is_no_dataset_is_not_read() -> None:
    settings = SimpleNamespace(completion_only_loss=None)
    assert masks_prompts_of_messages(prepare, ([CONVERSATION], "tokenizer", settings), {}) is False
