from __future__ import annotations

import pytest

from trl_hotfix.testing import CharacterTokenizer, PromptTokenizer, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_ids_of_the_character_tokenizer_are_code_points() -> None:
    pytest.importorskip("transformers")
    tokenizer = CharacterTokenizer()
    assert tokenizer("ab\1") == {"input_ids": [97, 98, 1], "attention_mask": [1, 1, 1]}
    assert tokenizer.decode([97, 98]) == "ab"


def test_the_chat_template_marks_each_message() -> None:
    pytest.importorskip("transformers")
    tokenizer = CharacterTokenizer()
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "uhi\1ayo\1"
    assert tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True) == "uhi\1a"
    assert tokenizer.apply_chat_template(MESSAGES[:1]) == [117, 104, 105, 1]
    assert tokenizer.apply_chat_template(MESSAGES[:1], return_dict=True)["attention_mask"] == [1, 1, 1, 1]


def test_it_pads_on_the_right() -> None:
    pytest.importorskip("torch")
    examples = [{"input_ids": [5], "attention_mask": [1]}, {"input_ids": [6, 7], "attention_mask": [1, 1]}]
    batch = CharacterTokenizer().pad(examples)
    assert batch["input_ids"].tolist() == [[5, 0], [6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_the_tiny_tokenizer_is_one_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer()
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 0, 1)


def test_the_prompt_tokenizer_encodes_all_prompts_alike() -> None:
    pytest.importorskip("torch")
    tokenizer = PromptTokenizer()
    assert tokenizer(["a", "b"]) == {"input_ids": [[3, 4], [3, 4]], "attention_mask": [[1, 1], [1, 1]]}
    assert tokenizer("a").input_ids == [[3, 4]]
    assert tokenizer(text=["a", "b"], return_tensors="pt")["input_ids"].tolist() == [[3, 4], [3, 4]]
    assert tokenizer.batch_decode([[3], [4]]) == ["", ""]
