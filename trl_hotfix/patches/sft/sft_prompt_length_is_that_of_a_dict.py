"""SFT takes the length of a dict, 2, for the length of a prompt of messages.

``tokenize`` in ``_prepare_dataset`` lets the completion start at the length of what ``apply_chat_template`` makes of
the prompt's messages. Up to transformers 4 that is a list of token ids. From 5 on it is a dict of the ids and of the
attention mask, unless it is told not to. TRL 0.27.1 tells it (``return_dict=False``).

The wrapper gives TRL a view of the tokenizer that tells it where the call says nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, masks_prompts_of_messages, pickled_as_made, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, messages, only_iterable, prepared_completions


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

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_with_lists, self.__wrapped__)

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
    prepared = prepared_completions(module, _ROWS, _Tokenizer())
    if not prepared[0][1]:
        return absent("the length of the prompt is not taken from its tokens")
    if any(trained != sorted(trained) for _, trained in prepared):
        raise AssertionError("a completion does not go on to the end")
    found = [trained.index(True) for _, trained in prepared]
    right = [sum(len(turn) + 1 for turn in prompt) for prompt, _ in _ROWS] * 2
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
