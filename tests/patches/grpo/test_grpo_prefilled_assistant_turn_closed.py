"""A prompt that ends with an assistant message is tokenized up to the end of its text, and others as TRL does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.trainer import grpo_trainer, rloo_trainer

from trl_hotfix.testing import StopConstruction, default_arguments, single_process, stub_that_generates, tiny_causal_lm

import tiny

ID = "grpo-prefilled-assistant-turn-closed"
LETTERS = ".acds_uxyz "
PADDING = LETTERS.index("_")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] or [] %}{{ block['text'] or '' }}{% endfor %}{% endif %}"
    ".{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""The first letter of the role, the content and a point for each message."""
WITHOUT_ASSISTANT = (
    "{% for message in messages if message['role'] != 'assistant' %}{{ message['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def conversation(*contents: Any, **more: Any) -> list[dict[str, Any]]:
    """Return messages of a user, an assistant, a user and so on. ``more`` is of the last one."""
    listed = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return [*listed[:-1], {**listed[-1], **more}]


class Prompt(NamedTuple):
    messages: list[dict[str, Any]]
    text: str
    of_trl: str
    """The text that TRL makes of it."""


def closed(text: str, *contents: Any, **more: Any) -> Prompt:
    return Prompt(conversation(*contents, **more), text, text)


OPEN = (
    Prompt(conversation("xy", "c"), "uxy.ac", "uxy.ac.a"),
    Prompt(conversation("z", [{"type": "video"}, {"type": "text", "text": "dc "}]), "uz.adc ", "uz.adc .a"),
    Prompt(conversation("x", "y", "zz", "cdc"), "ux.ay.uzz.acdc", "ux.ay.uzz.acdc.a"),
)
CLOSED = (
    closed("ux.ay.uz.a", "x", "y", "z"),
    closed("ux.a .a", "x", " "),
    closed("ux.a.a", "x", None),
    closed("ux.a.a", "x", [{"type": "video"}, {"type": "text", "text": None}]),
    closed("ux.ac.a", "x", "c", tool_calls=[{"name": "f"}]),
)
"""They end with a message of the user, with one that has no text to go on with, or with the call of a tool."""

all_open = [*((each,) for each in OPEN), OPEN]
mixed = [(CLOSED[0], OPEN[1], OPEN[0]), (OPEN[2], CLOSED[4], CLOSED[1]), (*OPEN, *CLOSED)]
all_closed = [*((each,) for each in CLOSED), CLOSED]
each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@pytest.fixture(params=[grpo_trainer, rloo_trainer], ids=["GRPO", "RLOO"])
def module(request: pytest.FixtureRequest) -> Any:
    return request.param


def letters() -> Any:
    """Return a tokenizer of transformers' own, whose tokens are letters."""
    word_level = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="_"))
    word_level.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="_", eos_token=".", padding_side="left")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def stub(module: ModuleType, processing_class: Any = None, *, training: bool = True) -> Any:
    name = "GRPO" if module is grpo_trainer else "RLOO"

    def generate(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        trainer.generated_with = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        return torch.cat([input_ids, torch.ones_like(input_ids)], dim=1)

    model = tiny_causal_lm().train(training)
    model.generate = generate
    trainer = stub_that_generates(
        getattr(module, f"{name}Trainer"),
        default_arguments(getattr(module, f"{name}Config")),
        model,
        processing_class=processing_class or letters(),
        generation_config=None,
        generation_kwargs={},
        environment_factories=None,
        _is_vlm=False,
    )
    trainer.module = module
    return trainer


def is_apart(trainer: Any) -> bool:
    """Return whether this release tokenizes prompts in a method of its own. Others do it where they generate."""
    return hasattr(trainer, "_tokenize_prompts")


def has_environments(trainer: Any) -> bool:
    return (
        is_apart(trainer) and "_batch_environments" in inspect.unwrap(type(trainer)._tokenize_prompts).__code__.co_names
    )


def tokenized(trainer: Any, prompts: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the method that tokenizes prompts returns. The token ids are the first of it."""
    method = trainer._tokenize_prompts if is_apart(trainer) else trainer._generate_single_turn
    with single_process(trainer.module):
        returned: tuple[Any, ...] = method(list(prompts))
    return returned


def texts(trainer: Any, prompts: Sequence[Any]) -> list[str]:
    return ["".join(LETTERS[token] for token in row) for row in tokenized(trainer, prompts)[0]]


def texts_of(trainer: Any, batch: Sequence[Prompt]) -> list[str]:
    return texts(trainer, [prompt.messages for prompt in batch])


def acts(trainer: Any) -> int | None:
    method = "_tokenize_prompts" if is_apart(trainer) else "_generate_single_turn"
    trainer_class = type(trainer).__mro__[1]
    return tiny.acts(ID, f"{trainer_class.__module__}:{trainer_class.__name__}.{method}", trainer)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that gives the warnings so far."""
    caplog.set_level(logging.WARNING, "trl_hotfix")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "trl_hotfix"]


@each_mode
@pytest.mark.parametrize("batch", [*all_open, *mixed])
def test_the_text_of_the_assistant_is_the_end_of_the_prompt(
    module: ModuleType, batch: Sequence[Prompt], training: bool
) -> None:
    trainer = stub(module, training=training)
    assert texts_of(trainer, batch) == [prompt.text for prompt in batch]
    assert acts(trainer) == 1


@each_mode
@pytest.mark.parametrize("batch", all_closed)
def test_a_prompt_that_cannot_be_continued_has_the_header_of_an_answer(
    module: ModuleType, batch: Sequence[Prompt], training: bool
) -> None:
    trainer = stub(module, training=training)
    assert texts_of(trainer, batch) == [prompt.text for prompt in batch]
    assert acts(trainer) == 0


@pytest.mark.parametrize("batch", [*all_open, *mixed, *all_closed])
def test_trl_closes_the_message_of_the_assistant(module: ModuleType, batch: Sequence[Prompt], switch: Any) -> None:
    with switch.off():
        assert texts_of(stub(module), batch) == [prompt.of_trl for prompt in batch]


def test_each_batch_of_each_trainer_is_tokenized_so(module: ModuleType) -> None:
    trainers = stub(module), stub(module)
    for step, batch in enumerate((OPEN, CLOSED, mixed[0], OPEN)):
        for trainer in trainers:
            trainer.state.global_step = step
            assert texts_of(trainer, batch) == [prompt.text for prompt in batch]
    assert [acts(trainer) for trainer in trainers] == [3, 3]


def test_prompts_without_messages_stay_as_they_are(module: ModuleType) -> None:
    trainer = stub(module)
    assert texts(trainer, ["xy", "z", ""]) == ["xy", "z", ""]
    assert acts(trainer) == 0


@pytest.mark.parametrize("batch", [OPEN, *mixed])
def test_the_padding_is_on_the_left_and_masked(module: ModuleType, batch: Sequence[Prompt]) -> None:
    trainer = stub(module)
    if is_apart(trainer):
        pytest.skip("this release takes the padding away where it tokenizes the prompts")
    texts_of(trainer, batch)
    longest = max(len(prompt.text) for prompt in batch)
    ids, mask = trainer.generated_with["input_ids"], trainer.generated_with["attention_mask"]
    assert mask.tolist() == [[0] * (longest - len(prompt.text)) + [1] * len(prompt.text) for prompt in batch]
    assert (ids == PADDING).equal(mask == 0)


def test_a_processor_has_its_tokens_padded_and_its_images_joined(module: ModuleType) -> None:
    def apply(conversation: Any, **kwargs: Any) -> dict[str, Any]:
        """Encode a message as a 7, and give two images for each message of a prompt that has more than two."""
        ids = torch.tensor([[7] * len(prompt) for prompt in conversation])
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        (prompt,) = conversation
        images = torch.tensor([[1.0], [2.0]]) * len(prompt)
        return {**tokens, "pixel_values": images} if len(prompt) > 2 else tokens

    trainer = stub(module, SimpleNamespace(apply_chat_template=apply, tokenizer=SimpleNamespace(pad_token_id=3)))
    ids, *others = tokenized(trainer, [OPEN[0].messages, OPEN[2].messages, CLOSED[0].messages])
    assert [[int(token) for token in row] for row in ids][1] == [7] * 4
    if is_apart(trainer):
        images = others[-1]["pixel_values"]
    else:
        given = trainer.generated_with
        assert given["input_ids"].tolist() == [[3, 3, 7, 7], [7, 7, 7, 7], [3, 7, 7, 7]]
        assert given["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
        images = given["pixel_values"]
    assert images.tolist() == [[4.0], [8.0], [3.0], [6.0]]


@pytest.mark.parametrize("batch", [OPEN, *mixed])
def test_each_prompt_has_the_tools_of_its_environment(module: ModuleType, batch: Sequence[Prompt]) -> None:
    trainer = stub(module)
    if not has_environments(trainer):
        pytest.skip("prompts have no environments")
    trainer.environment_factories = {"some": list}
    vars(trainer).update(_batch_environments=["some"] * len(batch), _env_tools={"some": []})
    assert texts_of(trainer, batch) == [prompt.text for prompt in batch]


def test_a_template_without_the_message_closes_the_turn_with_one_warning(module: ModuleType, said: Any) -> None:
    trainers = stub(module), stub(module)
    for count, trainer in enumerate(trainers, 1):
        trainer.processing_class.chat_template = WITHOUT_ASSISTANT
        for _ in range(2):
            assert texts(trainer, [conversation("x", "c"), conversation("z")]) == ["x.a", "z.a"]
            assert len(said()) == count
    assert all("the chat template cannot continue the last assistant message" in warning for warning in said())


def test_vllm_is_given_the_messages_as_they_are_with_one_warning(module: ModuleType, said: Any) -> None:
    for count, trainer in enumerate((stub(module), stub(module))):
        if is_apart(trainer):
            pytest.skip("in this release vLLM is given token ids")
        tokenizer = trainer.processing_class
        found = []

        def stop(trainer: Any = trainer, found: list[Any] = found) -> None:
            found.append(trainer.processing_class)
            raise StopConstruction

        vars(trainer).update(
            use_vllm=True,
            vllm_mode="server",
            _last_loaded_step=-1,
            _move_model_to_vllm=stop,
            vllm_generation=SimpleNamespace(sync_weights=stop),
        )
        for prompt, warned in ((CLOSED[0], count), (OPEN[0], count + 1), (OPEN[0], count + 1)):
            with pytest.raises(StopConstruction):
                texts_of(trainer, [prompt])
            assert len(said()) == warned
        assert found == [tokenizer] * 3
    assert all("vLLM closes the last assistant message" in warning for warning in said())


def test_the_trainer_keeps_its_tokenizer(module: ModuleType) -> None:
    trainer = stub(module)
    tokenizer = trainer.processing_class
    texts_of(trainer, OPEN)
    assert trainer.processing_class is tokenizer


def test_the_trainer_keeps_its_tokenizer_after_an_error(module: ModuleType) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise StopConstruction

    tokenizer = SimpleNamespace(apply_chat_template=fail)
    trainer = stub(module, tokenizer)
    with pytest.raises(StopConstruction):
        texts_of(trainer, OPEN)
    assert trainer.processing_class is tokenizer
