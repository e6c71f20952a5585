"""SFT takes the length of a dict, 2, for the length of a prompt of messages.

``tokenize`` in ``_prepare_dataset`` lets the completion start at the length of what ``apply_chat_template`` makes of
the prompt's messages. Up to transformers 4 that is a list of token ids. From 5 on it is a dict of the ids and of the
attention mask, unless it is told not to. TRL 0.27.1 tells it (``return_dict=False``).

The wrapper gives TRL a view of the tokenizer that tells it where the call says nothing of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, masks_prompts_of_messages, replaced_argument
from ..model import Outcome, Verdict
from ..testing import (
    CharacterTokenizer,
    default_arguments,
    messages,
    only_iterable,
    single_process,
    stream,
    stub_trainer,
)


def take_the_length_of_the_prompt(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give TRL such a tokenizer if the prompts are messages, and the loss is that of the completions."""
    if masks_prompts_of_messages(wrapped, args, kwargs):
        tokenizer = argument(wrapped, args, kwargs, "processing_class")
        args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", _with_lists(tokenizer))
    return wrapped(*args, **kwargs)


def _with_lists(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that renders a conversation as a list unless it is asked for a dict.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _with_lists, (self.__wrapped__, hashlib.sha256(Path(__file__).read_bytes()).hexdigest())

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.apply_chat_template(conversation, **{"return_dict": False, **kwargs})

    return View(tokenizer)


_ROWS = (
    (("uab",), ("acd",)),
    (("sx", "uabc"), ("ad",)),
    (("uab", "acd", "ue"), ("af", "ug", "ahi")),
    (("ub",), ("acdef",)),
)
"""Prompts and completions."""


def prompts_are_not_trained(module: ModuleType) -> Outcome:
    """Count the tokens before the completions of two trainers: those of the prompts, or two in each row."""
    from transformers import PreTrainedTokenizerBase

    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("there is no loss of the completion alone")
    render = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if not render["return_dict"].default:
        return absent("in this transformers a tokenizer renders a list of token ids")
    # A trainer prepares its datasets one after the other, and there may be other trainers.
    trainers, datasets = [_trainer(module) for _ in range(2)], (_ROWS[:2], _ROWS[2:])
    found = [length for trainer in trainers for rows in datasets for length in _prompt_lengths(module, trainer, rows)]
    if not found:
        return absent("the length of the prompt is not taken from its tokens")
    right = [sum(len(turn) + 1 for turn in prompt) for prompt, _ in _ROWS] * len(trainers)
    wrong = [2] * len(right)
    if found not in (right, wrong):
        raise AssertionError(f"the prompts have {found} tokens, expected {right}")
    outcome = judge(sum(found), right=sum(right), wrong=sum(wrong), lengths=found)
    if outcome.verdict is Verdict.FIXED:
        mistakes = _mistakes_of_the_view()
        settings, tokenizer = SimpleNamespace(completion_only_loss=None), _Tokenizer()
        texts = only_iterable({"prompt": "a", "completion": "b"}), tokenizer, settings
        if take_the_length_of_the_prompt(_tokenizer, None, texts, {}) is not tokenizer:
            mistakes.append("the tokenizer of texts is another one")
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _tokenizer(dataset: Any, processing_class: Any, args: Any) -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrapper reads, and return the tokenizer."""
    return processing_class


class _Tokenizer(CharacterTokenizer):
    """It renders a conversation as a dict unless it is told not to, as the fast ones of transformers 5 do.

    TRL asks for the first entry, which is an encoding of ``tokenizers``.
    """

    def __call__(self, text: str, **kwargs: Any) -> Any:
        from tokenizers import Encoding
        from transformers import BatchEncoding

        return BatchEncoding(dict(super().__call__(text)), Encoding())

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        # Nothing begins an answer: before 0.24.0 a beginning is none of the prompt's, which is another bug.
        return super().render(messages, add_generation_prompt=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        return super().apply_chat_template(messages, tokenize, return_dict, add_generation_prompt, **kwargs)


def _trainer(module: ModuleType) -> Any:
    """Return a trainer that prepares datasets for the loss of completions. It neither truncates nor packs."""
    lengths = {"max_length": None, "max_seq_length": None, "shuffle_dataset": False}
    return stub_trainer(
        module.SFTTrainer,
        default_arguments(module.SFTConfig, completion_only_loss=True, **lengths),
        chat_template=None,
        completion_only_loss=True,
        _is_vlm=False,
    )


def _prompt_lengths(module: ModuleType, trainer: Any, pairs: Any) -> list[int]:
    """Return how many tokens of each row are before the completion. There are none without a mask of completions."""
    rows = [{"prompt": messages(*prompt), "completion": messages(*completion)} for prompt, completion in pairs]
    with single_process(module):
        prepared = list(trainer._prepare_dataset(stream(rows), _Tokenizer(), trainer.args, False, None, "train"))
    whole = ["".join(f"{turn}\1" for turn in (*prompt, *completion)) for prompt, completion in pairs]
    texts = [CharacterTokenizer().decode(row["input_ids"]) for row in prepared]
    if texts != whole:
        raise AssertionError(f"the tokens are those of {texts}, expected {whole}")
    masks = [row["completion_mask"] for row in prepared if "completion_mask" in row]
    if any(mask != sorted(mask) for mask in masks):
        raise AssertionError("a completion does not go on to the end")
    return [mask.index(1) for mask in masks]


def _mistakes_of_the_view() -> list[str]:
    """Return what is wrong with what the view renders, here and in another process."""
    import pickle

    view = _with_lists(_Tokenizer())
    again = pickle.loads(pickle.dumps(view))
    prompt, ids = messages("ub"), [*map(ord, "ub\1")]
    rendered = {
        "a list": (view.apply_chat_template(prompt, tokenize=True), ids),
        "a dict": (view.apply_chat_template(prompt, return_dict=True)["input_ids"], ids),
        "a text": (view.apply_chat_template(prompt, tokenize=False), "ub\1"),
        "another process": (again.apply_chat_template(prompt), ids),
        "a call": (view("ub\1")["input_ids"], ids),
    }
    mistakes = [f"{name}: {found}" for name, (found, expected) in rendered.items() if found != expected]
    if type(again.__wrapped__) is not _Tokenizer or not view.__reduce_ex__(2)[1][1]:
        mistakes.append("what is pickled is another tokenizer, or has no digest")
    return mistakes
