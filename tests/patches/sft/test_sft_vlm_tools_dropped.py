"""Each conversation of a batch with images is rendered with the tools and the options of its own row."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from trl.trainer import sft_trainer

from trl_hotfix import witness
from trl_hotfix.testing import CharacterProcessor, default_arguments, messages, stub_trainer

import tiny

ID, MODULE = "sft-vlm-tools-dropped", "trl.trainer.sft_trainer"
SET_COLUMNS = f"{MODULE}:SFTTrainer._set_signature_columns_if_needed"
COLLATE = f"{MODULE}:DataCollatorForVisionLanguageModeling._collate_language_modeling"
RENDER = f"{MODULE}:apply_chat_template"
COLUMNS = {"tools", "chat_template_kwargs"}

Options = Sequence[dict[str, Any]]
TOOLS: Options = (
    {"tools": [{"name": "T"}]},
    {"tools": ""},
    {"tools": '[{"name": "V"}, {"name": "W"}, {"name": "X"}]'},
)
"""For each of three rows tools, none, and tools as JSON, which are more."""

STYLES: Options = (
    {**TOOLS[0], "chat_template_kwargs": {"style": "!"}},
    {**TOOLS[1], "chat_template_kwargs": None},
    TOOLS[2],
)
"""The same, and a style for the chat template."""

EQUAL: Options = (STYLES[0],) * 3
BEFORE = {
    "tools": (TOOLS, ("T", "", "VWX")),
    "styles": (STYLES, ("T!", "", "VWX")),
    "equal": (EQUAL, ("T!", "T!", "T!")),
}
"""The options of three rows, and what the chat template renders of them before the messages."""

IMAGES, IMAGE = ([7], [], [8, 9]), "\2\2"
TEXTS = ("a", "bc", "d")

has_assistant_loss = pytest.mark.skipif(
    "assistant_only_loss" not in getattr(sft_trainer.DataCollatorForVisionLanguageModeling, "__dataclass_fields__", {}),
    reason="in this release the collator does not have the chat template tokenize",
)


def rows(kind: str, options: Options) -> list[dict[str, Any]]:
    """Return three rows with one image, none and two, of ``messages`` or of ``pairs`` of prompt and completion."""
    made = []
    for images, text, choice in zip(IMAGES, TEXTS, options, strict=True):
        user, assistant = messages(f"u{text}"), messages(f"a{text.upper()}")
        columns = {"messages": user + assistant} if kind == "messages" else {"prompt": user, "completion": assistant}
        made.append({"images": images, **columns, **choice})
    return made


def rendered(before: Sequence[str]) -> list[str]:
    """Return the texts of ``rows`` with these texts before the messages. An image is two tokens."""
    return [
        f"{first}u{len(images) * IMAGE}{text}\1a{text.upper()}\1"
        for first, images, text in zip(before, IMAGES, TEXTS, strict=True)
    ]


def texts(ids: Any) -> list[str]:
    """Return the characters of each row, without padding and without what is no label."""
    return ["".join(chr(token) for token in row if token > 0) for row in ids.tolist()]


def collator_of(**settings: Any) -> Any:
    return sft_trainer.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)


def acts(target: str) -> int:
    """Return in how many calls of functions and of collators the patch acted."""
    return witness.PROCESS.total(ID, target).acted


@pytest.mark.parametrize("max_length", [None, 6])
@pytest.mark.parametrize("case", BEFORE)
@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_each_conversation_of_each_batch_is_rendered_with_its_own_options(
    kind: str, case: str, max_length: int | None
) -> None:
    options, before = BEFORE[case]
    collator = collator_of(max_length=max_length)
    processor = collator.processor
    for _ in range(2):
        batch = collator(rows(kind, options))
        assert texts(batch["input_ids"]) == [text[:max_length] for text in rendered(before)]
        assert batch["pixel_values"] == [[7], [], [8, 9]]
        assert collator.processor is processor


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_trl_renders_conversations_without_tools(kind: str, switch: Any) -> None:
    with switch.off():
        assert texts(collator_of()(rows(kind, TOOLS))["input_ids"]) == rendered(["", "", ""])


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_a_batch_of_one_row_has_its_tools(kind: str) -> None:
    target = COLLATE if kind == "messages" else RENDER
    before = acts(target)
    batch = collator_of()(rows(kind, TOOLS)[:1])
    assert texts(batch["input_ids"]) == ["Tu\2\2a\1aA\1"]
    assert acts(target) == before + 1


@has_assistant_loss
def test_a_batch_without_images_has_its_tools_and_none_of_them() -> None:
    # A message with calls of tools may have no content.
    calls = [{"role": "assistant", "tool_calls": []}]
    batch = collator_of()(
        [{**row, "images": [], "messages": row["messages"] + calls} for row in rows("messages", TOOLS)]
    )
    assert "pixel_values" not in batch
    assert texts(batch["input_ids"]) == [text.replace("\2", "") + "a\1" for text in rendered(("T", "", "VWX"))]


@has_assistant_loss
@pytest.mark.parametrize("case", ["styles", "equal"])
def test_the_labels_of_the_assistant_are_those_of_its_messages(case: str) -> None:
    options, before = BEFORE[case]
    collator = collator_of(assistant_only_loss=True, chat_template="#")
    batch = collator(rows("messages", options))
    labels, ids = batch["labels"], batch["input_ids"]
    assert texts(ids) == rendered([f"#{first}" for first in before])
    assert texts(labels) == ["aA\1", "aBC\1", "aD\1"]
    assert ((labels == -100) | (labels == ids)).all()
    # Conversations with the same options are tokenized at once, and none a second time.
    assert collator.processor.calls == (1 if case == "equal" else 4)


NOTHING: Options = ({"tools": []}, {"tools": None}, {"chat_template_kwargs": {}})
FIRST_IS_PLAIN = [{"images": [], "text": "a", **TOOLS[0]}, {**rows("messages", TOOLS)[0], "text": "a"}]


@pytest.mark.parametrize(
    "batch",
    [rows("messages", NOTHING), [{**row, "text": "a"} for row in rows("pairs", TOOLS)], FIRST_IS_PLAIN],
    ids=["no tools", "plain texts", "the first row is a plain text"],
)
def test_a_batch_with_nothing_to_render_is_trls(batch: list[dict[str, Any]], switch: Any) -> None:
    collator, before = collator_of(), acts(COLLATE)
    # Up to 0.26 TRL changes the messages in place.
    patched = collator._collate_language_modeling(copy.deepcopy(batch))
    assert acts(COLLATE) == before
    with switch.off():
        unpatched = collator_of()._collate_language_modeling(batch)
    assert texts(patched["input_ids"]) == texts(unpatched["input_ids"])


class Recorder:
    """A processor that records with which of these options it renders."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        self.options.append({name: options[name] for name in ("tools", "style", "depth") if name in options})
        return "text"


def options_of(columns: dict[str, Any], *tools: Any, by_name: bool = False, **options: Any) -> dict[str, Any]:
    """Return the options with which TRL renders the prompt of a row that has these columns besides."""
    recorder, example = Recorder(), {"prompt": messages("ua"), **columns}
    before = dict(example)
    names = list(inspect.signature(sft_trainer.apply_chat_template).parameters)
    if by_name:
        sft_trainer.apply_chat_template(**dict(zip(names, (example, recorder, *tools), strict=False)), **options)
    else:
        sft_trainer.apply_chat_template(example, recorder, *tools, **options)
    assert example == before
    (found,) = recorder.options
    return found


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("tools", [(), (None,)], ids=["no argument", "None"])
def test_a_prompt_is_rendered_with_the_options_of_its_row(tools: tuple[Any, ...], by_name: bool) -> None:
    found = options_of(STYLES[0], *tools, by_name=by_name, depth=1)
    assert found == {**TOOLS[0], "style": "!", "depth": 1}


def test_a_prompt_may_have_none_for_its_options() -> None:
    assert options_of({"chat_template_kwargs": None}) == {"tools": None}
    assert options_of({**TOOLS[0], "chat_template_kwargs": None}) == TOOLS[0]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("columns", "tools"),
    [({**TOOLS[0], "chat_template_kwargs": {"style": "!"}}, ([{"name": "Y"}],)), ({"tools": None}, ()), ({}, ())],
    ids=["tools of the caller", "none", "no column"],
)
def test_trl_renders_a_prompt_that_has_its_tools_or_none(
    columns: dict[str, Any], tools: tuple[Any, ...], by_name: bool, switch: Any
) -> None:
    before = acts(RENDER)
    patched = options_of(columns, *tools, by_name=by_name, depth=1)
    assert acts(RENDER) == before
    with switch.off():
        assert patched == options_of(columns, *tools, by_name=by_name, depth=1)


def trainer_of(*, images: bool = True, own: list[str] | None = None, columns: list[str] | None = None) -> Any:
    """Return a trainer that has set its columns, twice: a dataloader of the evaluation asks again."""
    trainer = stub_trainer(
        sft_trainer.SFTTrainer,
        default_arguments(sft_trainer.SFTConfig),
        _is_vision_dataset=images,
        _is_vlm=images,
        _signature_columns=own,
        train_dataset=SimpleNamespace(column_names=columns),
    )
    for _ in range(2):
        trainer._set_signature_columns_if_needed()
    return trainer


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (None, 1),
        (["images", "messages"], 0),
        (["images", "messages", "tools"], 1),
        (["images", "messages", "chat_template_kwargs"], 1),
    ],
    ids=["not known", "neither", "tools", "chat_template_kwargs"],
)
def test_the_columns_are_kept_beside_those_of_trl(columns: list[str] | None, expected: int, switch: Any) -> None:
    trainer = trainer_of(columns=columns)
    with switch.off():
        unpatched = trainer_of(columns=columns)._signature_columns
    assert not COLUMNS & {*unpatched}
    assert sorted(trainer._signature_columns) == sorted([*unpatched, *COLUMNS])
    assert tiny.acts(ID, SET_COLUMNS, trainer) == expected


@pytest.mark.parametrize(
    ("images", "own"), [(False, None), (False, []), (True, ["images"])], ids=["of texts", "none of the user's", "own"]
)
def test_other_columns_are_those_of_trl(images: bool, own: list[str] | None, switch: Any) -> None:
    patched = trainer_of(images=images, own=own)
    assert tiny.acts(ID, SET_COLUMNS, patched) == 0
    with switch.off():
        unpatched = trainer_of(images=images, own=own)
    assert patched._signature_columns == unpatched._signature_columns
    assert not COLUMNS & {*patched._signature_columns}


def test_a_trainer_without_a_dataset_keeps_the_columns() -> None:
    trainer = trainer_of(own=[])
    trainer.train_dataset, trainer._signature_columns = None, None
    trainer._set_signature_columns_if_needed()
    assert {*trainer._signature_columns} >= COLUMNS
