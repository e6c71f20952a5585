"""The end of each assistant's turn is trained, wherever the template has it, and nothing else is trained besides."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft import assistant_mask_without_end_of_turn
from trl_hotfix.patches.sft.assistant_mask_without_end_of_turn import train_the_end_of_turn
from trl_hotfix.testing import CharacterTokenizer, messages, only_iterable, sft_prepared

import tiny

TURNS = messages("ux", "aYZ") * 2
SEVERAL = [TURNS, messages("uxx", "aW"), messages("ux", "aYZV", "ux")]

TEMPLATES = {
    "outside": ("", "YZ\1YZ\1"),
    "inside": ("\1", "YZ\1YZ\1"),
    "inside, with a line break": ("\1\n", "YZ\1\nYZ\1\n"),
    "inside, twice": ("\1\1", "YZ\1\1YZ\1\1"),
    "outside, behind a line break": ("\n", "YZ\n\1YZ\n\1"),
    "outside, behind a tool call": ("t", "YZt\1YZt\1"),
    "none": ("!", "YZ!YZ!"),
}
"""What a template puts behind an answer inside the mask, and what is to be trained."""


class Tokenizer(CharacterTokenizer):
    """Its template has a letter for the role, the content and, behind an answer, an end of turn.

    Roles and ends are special tokens. The end of a tool call is an added token and not special. The beginning of a
    sequence is special too, but nobody's turn ends with it.
    """

    bos_token_id = 2  # type: ignore[assignment]

    def __init__(self, inside: str = "") -> None:
        self.inside = inside

    @property
    def added_tokens_decoder(self) -> dict[int, SimpleNamespace]:
        return {ord(token): SimpleNamespace(special=token != "t") for token in "ua\1\2t"}

    def apply_chat_template(self, messages: list[dict[str, str]], *args: Any, **kwargs: Any) -> Any:
        """Return the tokens. Behind ``!`` comes the beginning of the next sequence, and no end of turn."""
        tokens, mask = "", []
        for message in messages:
            tokens += message["role"][0]
            answer = message["content"] + self.inside if message["role"] == "assistant" else ""
            end = "" if "\1" in self.inside else "\2" if "!" in self.inside else "\1"
            tokens += answer + end if answer else message["content"]
            mask += [0, *[1] * len(answer), *[0] * len(end if answer else message["content"])]
        processed = self(tokens)
        return {**processed, "assistant_masks": mask} if kwargs.get("return_assistant_tokens_mask") else processed


class Processor:
    """Has a tokenizer inside, and returns a batch of one."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        row = self.tokenizer.apply_chat_template(conversation, **kwargs)
        return {name: [values] for name, values in row.items()}


def trained(tokenizer: Any, rows: Any = (TURNS,), *, assistant_only_loss: bool = True) -> list[str]:
    """Return the tokens of each conversation that are trained."""
    given = [{"messages": turns} for turns in rows]
    found = []
    for row in sft_prepared(sft_trainer, given, tokenizer, assistant_only_loss=assistant_only_loss):
        ids = row["input_ids"]
        mask = row.get("assistant_masks") or [label != -100 for label in row.get("labels", ids)]
        found.append("".join(chr(token) for token, is_trained in zip(ids, mask, strict=True) if is_trained))
    return found


@pytest.mark.parametrize(("inside", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_each_turn_is_trained_with_its_end(inside: str, expected: str) -> None:
    assert trained(Tokenizer(inside)) == [expected]


def test_the_turns_of_each_row_of_each_dataset_are_trained_with_their_ends() -> None:
    for _ in range(2):
        assert trained(Tokenizer(), SEVERAL) == ["YZ\1YZ\1", "W\1", "YZV\1"]


def test_a_turn_of_white_space_is_trained_with_its_end() -> None:
    assert trained(Tokenizer(), [messages("ux", "a ")]) == [" \1"]


def test_trl_trains_no_end_that_is_outside(switch: Any) -> None:
    with switch.off():
        assert trained(Tokenizer(), SEVERAL) == ["YZYZ", "W", "YZV"]


def test_all_tokens_are_trained_as_before() -> None:
    assert trained(Tokenizer(), assistant_only_loss=False) == ["uxaYZ\1uxaYZ\1"]


TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' <eos> ' }}"
    "{% else %}{{ 'w59 ' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ ' <eos> ' }}{% endif %}"
    "{% endfor %}"
)


def test_a_trainer_trains_and_evaluates_on_ends(tmp_path: Path) -> None:
    conversations = [
        {"messages": [{"role": "user", "content": f"w{number}"}, {"role": "assistant", "content": "w2"}]}
        for number in (4, 6, 8)
    ]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, max_steps=1, assistant_only_loss=True),
        train_dataset=Dataset.from_list(conversations[:2]),
        eval_dataset=Dataset.from_list(conversations[2:]),
        tokenizer=tiny.chat_tokenizer(TEMPLATE),
    )
    for dataset, words in ((trainer.train_dataset, [7, 9]), (trainer.eval_dataset, [11])):
        for row, word in zip(dataset, words, strict=True):
            assert row["input_ids"] == [61, word, 1, 62, 5, 1]
            mask = row.get("assistant_masks") or [label != -100 for label in row["labels"]]
            assert list(map(int, mask)) == [0, 0, 0, 0, 1, 1]


def prepare(dataset: Any, processing_class: Any, args: Any) -> Any:
    """Stand for TRL's method, and return the tokenizer that it is given."""
    return processing_class


def view_of(processing_class: Any, *, assistant_only_loss: bool = True) -> Any:
    settings = SimpleNamespace(assistant_only_loss=assistant_only_loss)
    return train_the_end_of_turn(Call(prepare, None, (only_iterable({}), processing_class, settings)))


MASK = [0, 0, 0, 1, 1, 1] * 2


def mask_of(view: Any) -> Any:
    return view.apply_chat_template(TURNS, return_assistant_tokens_mask=True)["assistant_masks"]


def test_the_mask_of_a_processor_has_ends() -> None:
    assert mask_of(view_of(Processor())) == [MASK]


def test_a_mask_that_nobody_asks_for_is_not_made() -> None:
    assert "assistant_masks" not in view_of(Tokenizer()).apply_chat_template(TURNS)


def test_trl_has_its_own_tokenizer_where_all_tokens_are_trained() -> None:
    tokenizer = Tokenizer()
    assert view_of(tokenizer, assistant_only_loss=False) is tokenizer


def test_the_view_of_the_tokenizer_can_be_pickled() -> None:
    assert mask_of(pickle.loads(pickle.dumps(view_of(Tokenizer())))) == MASK


def test_the_key_of_the_cache_changes_with_the_code() -> None:
    digest = hashlib.sha256(Path(assistant_mask_without_end_of_turn.__file__).read_bytes()).hexdigest()
    assert digest.encode() in pickle.dumps(view_of(Tokenizer()))


def test_the_users_tokenizer_stays_as_it_is() -> None:
    tokenizer = Tokenizer()
    view_of(tokenizer)
    assert mask_of(tokenizer) == [0, 0, 0, 1, 1, 0] * 2
