"""Each conversation of a batch with images is rendered with the tools of its own row, by DPO and by KTO."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from trl.trainer import dpo_trainer, kto_trainer

from trl_hotfix import witness
from trl_hotfix.testing import CharacterProcessor, messages

ID = "dpo-kto-vlm-tools-dropped"

TOOLS: Sequence[Any] = ([{"name": "T"}], None, [{"name": "V"}, {"name": "W"}])
AS_JSON = ('[{"name": "T"}]', "", '[{"name": "V"}, {"name": "W"}]')
SHOWN = ("T", "", "VW")
NOTHING: Sequence[Any] = ([], None, "", "[]", "null")
IMAGES, IMAGE = ([7], [], [8, 9]), "\2\2"
TEXTS = ("a", "bc", "d")


@pytest.fixture(params=["DPO", "KTO"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "DPO":
        return dpo_trainer
    if not hasattr(kto_trainer, "DataCollatorForVisionUnpairedPreference"):
        pytest.skip("KTO of this release renders no tools, or no images")
    return kto_trainer


def rows(module: ModuleType, tools: Sequence[Any], **more: Any) -> list[dict[str, Any]]:
    """Return three rows with one image, none and two; ``more`` are other columns."""
    made = []
    for images, text, of_row in zip(IMAGES, TEXTS, tools, strict=True):
        columns: dict[str, Any] = {"images": images, "prompt": messages(f"u{text}"), "tools": of_row, **more}
        answers = messages(f"a{text.upper()}"), messages(f"ar{text}")
        if module is dpo_trainer:
            columns |= {"chosen": answers[0], "rejected": answers[1]}
        else:
            columns |= {"completion": answers[0], "label": True}
        made.append(columns)
    return made


def rendered(module: ModuleType, shown: Sequence[str], style: str = "") -> list[str]:
    """Return the sequences of the batch of ``rows``: the chosen ones, and those of DPO that are rejected."""
    prompts = [
        f"{tools}{style}u{len(images) * IMAGE}{text}\1a"
        for tools, images, text in zip(shown, IMAGES, TEXTS, strict=True)
    ]
    chosen = [f"{prompt}{text.upper()}\1" for prompt, text in zip(prompts, TEXTS, strict=True)]
    rejected = [f"{prompt}r{text}\1" for prompt, text in zip(prompts, TEXTS, strict=True)]
    return chosen + rejected if module is dpo_trainer else chosen


def collated(module: ModuleType, examples: list[dict[str, Any]], **settings: Any) -> Any:
    if module is dpo_trainer:
        collator = module.DataCollatorForVisionPreference(CharacterProcessor(), **settings)
    else:
        collator = module.DataCollatorForVisionUnpairedPreference(CharacterProcessor(), **settings)
    return collator(examples)


def fields_of(collator_class: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(collator_class)]


def texts(batch: Any, mask: str = "attention_mask", ids: str = "input_ids") -> list[str]:
    """Return the characters of each row that the mask has."""
    return ["".join(chr(token) for token in row if token > 0) for row in (batch[ids] * batch[mask]).tolist()]


def acts() -> int:
    return witness.PROCESS.total(ID, f"{dpo_trainer.__name__}:apply_chat_template").acted + (
        witness.PROCESS.total(ID, f"{kto_trainer.__name__}:apply_chat_template").acted
    )


@pytest.mark.parametrize("max_length", [None, 5])
@pytest.mark.parametrize("tools", [TOOLS, AS_JSON], ids=["structs", "JSON"])
def test_each_conversation_of_each_batch_has_its_own_tools(
    module: ModuleType, tools: Sequence[Any], max_length: int | None
) -> None:
    settings = {"max_length": max_length} if max_length else {}
    if module is dpo_trainer and not settings.keys() <= set(fields_of(module.DataCollatorForVisionPreference)):
        pytest.skip("the collator of this release does not truncate")
    for _ in range(2):
        before = acts()
        batch = collated(module, rows(module, tools), **settings)
        assert texts(batch) == [text[:max_length] for text in rendered(module, SHOWN)]
        assert batch["pixel_values"][:3] == [[7], [], [8, 9]]
        assert acts() == before + 2


def test_a_batch_of_one_row_has_its_tools(module: ModuleType) -> None:
    settings = {} if module is dpo_trainer else {"calculate_kl": False}
    batch = collated(module, rows(module, TOOLS)[2:], **settings)
    assert texts(batch) == rendered(module, SHOWN)[2::3]


def test_a_batch_without_images_has_its_tools(module: ModuleType) -> None:
    batch = collated(module, [{**row, "images": []} for row in rows(module, TOOLS)])
    assert texts(batch) == [text.replace(IMAGE, "") for text in rendered(module, SHOWN)]


def test_the_completions_alone_are_trained_on(module: ModuleType) -> None:
    batch = collated(module, rows(module, TOOLS))
    answers = ["A\1", "BC\1", "D\1"] + ["ra\1", "rbc\1", "rd\1"] * (module is dpo_trainer)
    assert texts(batch, "completion_mask") == answers


def test_the_completions_of_ktos_kl_have_the_tools_of_their_prompts(module: ModuleType) -> None:
    if module is dpo_trainer:
        pytest.skip("DPO has no such completions")
    batch = collated(module, rows(module, TOOLS))
    prompts = [text.rpartition("\1a")[0] for text in rendered(module, SHOWN)]
    assert [text.rpartition("\1a")[0] for text in texts(batch, "KL_attention_mask", "KL_input_ids")] == prompts


def test_the_options_of_the_template_are_those_of_the_row(module: ModuleType) -> None:
    batch = collated(module, rows(module, TOOLS, chat_template_kwargs={"style": "!"}))
    assert texts(batch) == rendered(module, SHOWN, "!")


def test_trl_renders_conversations_without_tools(module: ModuleType, switch: Any) -> None:
    with switch.off():
        assert texts(collated(module, rows(module, TOOLS))) == rendered(module, ("", "", ""))


@pytest.mark.parametrize("nothing", NOTHING)
def test_a_row_without_tools_is_rendered_as_by_trl(module: ModuleType, nothing: Any) -> None:
    before = acts()
    batch = collated(module, rows(module, [nothing] * 3))
    assert texts(batch) == rendered(module, ("", "", ""))
    assert acts() == before


def test_a_row_without_the_column_is_rendered_as_by_trl(module: ModuleType) -> None:
    before, examples = acts(), rows(module, TOOLS)
    for row in examples:
        del row["tools"]
    assert texts(collated(module, examples)) == rendered(module, ("", "", ""))
    assert acts() == before


def test_plain_texts_are_not_rendered(module: ModuleType, switch: Any) -> None:
    names = ("prompt", "chosen", "rejected", "completion")
    plain = [
        {name: value[0]["content"] if name in names else value for name, value in row.items()}
        for row in rows(module, TOOLS)
    ]
    before = acts()
    patched = texts(collated(module, copy.deepcopy(plain)))
    assert acts() == before
    with switch.off():
        assert texts(collated(module, plain)) == patched


class Recorder:
    """A processor that records the tools that it is given."""

    def __init__(self) -> None:
        self.tools: list[Any] = []

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        self.tools.append(options["tools"])
        return "text"


@pytest.mark.parametrize("by_name", [False, True])
def test_the_tools_of_a_caller_come_first(module: ModuleType, by_name: bool) -> None:
    recorder, example = Recorder(), {"prompt": messages("ua"), "tools": TOOLS[0]}
    mine, before = [{"name": "Y"}], acts()
    if by_name:
        names = list(inspect.signature(module.apply_chat_template).parameters)[:3]
        module.apply_chat_template(**dict(zip(names, (example, recorder, mine), strict=True)))
    else:
        module.apply_chat_template(example, recorder, mine)
    assert recorder.tools == [mine]
    assert acts() == before


@pytest.mark.parametrize("by_name", [False, True])
def test_the_row_stays_as_it_is(module: ModuleType, by_name: bool) -> None:
    recorder, example = Recorder(), {"prompt": messages("ua"), "tools": AS_JSON[2]}
    names = list(inspect.signature(module.apply_chat_template).parameters)[:2]
    given = {**example}
    if by_name:
        module.apply_chat_template(**dict(zip(names, (example, recorder), strict=True)))
    else:
        module.apply_chat_template(example, recorder)
    assert (recorder.tools, example) == ([TOOLS[2]], given)
