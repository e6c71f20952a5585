"""Tokenizers without files: one of characters, and two of transformers' own, of digits and with a single token."""

from __future__ import annotations

from typing import Any


class CharacterTokenizer:
    """A tokenizer whose ids are the characters' code points, and whose end-of-sequence token is the character 1."""

    eos_token, eos_token_id, pad_token, pad_token_id = "\1", 1, "\0", 0
    bos_token = bos_token_id = chat_template = None
    padding_side = "right"
    model_max_length = 1024

    def __call__(self, text: str, **kwargs: Any) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": list(map(ord, text)), "attention_mask": [1] * len(text)})

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Apply the chat template: the first letter of the role, the content and an end of sequence per message."""
        turns = (f"{message['role'][0]}{message['content']}{self.eos_token}" for message in messages)
        return "".join(turns) + ("a" if add_generation_prompt else "")

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        if not tokenize:
            return text
        return self(text) if return_dict else self(text)["input_ids"]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(map(chr, ids))

    def pad(self, examples: list[dict[str, list[int]]], **kwargs: Any) -> dict[str, Any]:
        """Pad the examples on the right and return them as tensors ``(batch, longest)``."""
        import torch

        longest = max(len(example["input_ids"]) for example in examples)
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return {
            name: torch.tensor([example[name] + [filler] * (longest - len(example[name])) for example in examples])
            for name, filler in fillers.items()
        }


class BeginningTokenizer(CharacterTokenizer):
    """Puts the character 2 before a text. Of several texts it returns padded tensors if they are asked for."""

    bos_token: Any = "\2"
    bos_token_id: Any = 2

    def __call__(self, text: Any, add_special_tokens: bool = True, **settings: Any) -> Any:
        if isinstance(text, str):
            return super().__call__((self.bos_token or "") * add_special_tokens + text)
        rows = [self(each, add_special_tokens) for each in text]
        return self.pad(rows) if "return_tensors" in settings else {"input_ids": [row["input_ids"] for row in rows]}

    def batch_decode(self, ids: Any, **settings: Any) -> list[str]:
        """Return the texts of rows of ids."""
        return list(map(self.decode, ids))


def tiny_tokenizer() -> Any:
    """Return a tokenizer of transformers' own, with one token, for constructors that check the class."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="<pad>", eos_token="<pad>")


def digit_tokenizer(**settings: Any) -> Any:
    """Return a tokenizer of transformers' own, whose tokens are digits: 0 is padding and 1 the end of a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="0", eos_token="1", **settings)
