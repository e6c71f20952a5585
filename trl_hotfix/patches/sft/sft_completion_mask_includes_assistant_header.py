"""SFT takes the header of the assistant's turn for a part of the completion.

``tokenize`` in ``_prepare_dataset`` lets the completion start at the length of what ``apply_chat_template`` makes of
the prompt's messages. Up to 0.18.2 the prompt was rendered with the generation prompt, by ``trl.apply_chat_template``.
0.19.0 calls the tokenizer's own method, without ``add_generation_prompt``. Pull request 4201 adds that in 0.24.0.

The wrapper gives TRL a view of the tokenizer that adds it to the call of a prompt. The next call is that of the prompt
with its completion: in 0.19 it has no other arguments, so the view has to take them in turn. From 0.20.0 on only the
second one asks for a dict. (Under transformers 5 it is the first one that has to ask for a list: that is
``sft-prompt-length-is-that-of-a-dict``.)
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, masks_prompts_of_messages, pickled_as_made, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, messages, only_iterable, prepared_completions, sft_prepared


def leave_the_header_to_the_prompt(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give TRL such a tokenizer if the prompts are messages, and the loss is that of the completions."""
    if masks_prompts_of_messages(wrapped, args, kwargs):
        tokenizer = argument(wrapped, args, kwargs, "processing_class")
        args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", _with_headers(tokenizer))
    return wrapped(*args, **kwargs)


def _with_headers(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that renders every other conversation, a prompt, with the generation prompt.

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        _self_after_prompt = False

        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_with_headers, self.__wrapped__)

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            is_prompt = not self._self_after_prompt and not kwargs.get("return_dict")
            # After an error the next row begins with its prompt.
            self._self_after_prompt = False
            # What a row's chat_template_kwargs say is passed on.
            header = {"add_generation_prompt": True} if is_prompt else {}
            rendered = self.__wrapped__.apply_chat_template(conversation, **{**header, **kwargs})
            self._self_after_prompt = is_prompt
            return rendered

    return View(tokenizer)


_ROWS = (
    (("uab",), ("acd",), "cd\1"),
    (("sx", "uabc"), ("ad",), "d\1"),
    (("uab", "ac", "ud"), ("aefg",), "efg\1"),
    # This prompt begins with the first one and its completion.
    (("uab", "acd", "ue"), ("af", "ug", "ahi"), "f\1ug\1ahi\1"),
    (("ub",), ("acd",), "cd\1"),
)
"""Prompts, completions, and what is to be trained. The template ends each message, and ``a`` is a header."""


def headers_are_not_trained(module: ModuleType) -> Outcome:
    """Count the tokens that are trained of conversations, with their headers and without them."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("there is no loss of the completion alone")
    prepared = prepared_completions(module, [(prompt, answer) for prompt, answer, _ in _ROWS], CharacterTokenizer())
    if not prepared[0][1]:
        return absent("there is no loss of the completion alone")
    found = ["".join(itertools.compress(*row)) for row in prepared]
    trained = [text for _, _, text in _ROWS] * 2
    with_headers = [f"a{text}" for text in trained]
    lengths = [sum(map(len, texts)) for texts in (found, trained, with_headers)]
    outcome = judge(lengths[0], right=lengths[1], wrong=lengths[2], texts=found)
    expected = trained if outcome.verdict is Verdict.FIXED else with_headers
    if found != expected:
        raise AssertionError(f"{found} are trained instead of {expected}")
    if outcome.verdict is Verdict.FIXED:
        mistakes = [*_mistakes_elsewhere(module), *_mistakes_of_the_view()]
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong with pairs of texts, and with messages, of which nothing is a prompt."""
    tokenizer = CharacterTokenizer()
    pairs = [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "fgh"}]
    chats = [{"messages": messages("uab", "ac")}, {"messages": messages("ud", "aef")}]
    kinds: dict[str, tuple[list[dict[str, Any]], bool, list[str]]] = {
        "pairs": (pairs, True, ["abcd\1", "efgh\1"]),
        "messages": (chats, False, ["uab\1ac\1", "ud\1aef\1"]),
    }
    mistakes = []
    for name, (rows, completion_only_loss, expected) in kinds.items():
        prepared = sft_prepared(module, rows, tokenizer, completion_only_loss=completion_only_loss)
        tokenised = [tokenizer.decode(row["input_ids"]) for row in prepared]
        mistakes += [f"of {name}, {tokenised} are tokenised"] * (tokenised != expected)
    texts = only_iterable({"prompt": "a", "completion": "b"}), tokenizer, SimpleNamespace(completion_only_loss=None)
    if leave_the_header_to_the_prompt(_tokenizer, None, texts, {}) is not tokenizer:
        mistakes.append("the tokenizer of texts is another one")
    return mistakes


def _tokenizer(dataset: Any, processing_class: Any, args: Any) -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrapper reads, and return the tokenizer."""
    return processing_class


def _mistakes_of_the_view() -> list[str]:
    """Return what is wrong with the calls of each release, in another process, and after an error."""
    import pickle

    class Failing:
        """A tokenizer that renders no message of nothing."""

        def apply_chat_template(self, turns: Any, **kwargs: Any) -> Any:
            if not turns[-1]["content"]:
                raise ValueError
            return CharacterTokenizer().apply_chat_template(turns, tokenize=False, **kwargs)

    prompt, whole, nothing = (messages(*turns) for turns in (("ub",), ("ub", "ac"), ("ub", "a")))
    view = _with_headers(tokenizer := CharacterTokenizer())
    again = pickle.loads(pickle.dumps(view))
    failing = _with_headers(Failing())
    texts: dict[str, list[str]] = {
        "0.19": [view.apply_chat_template(part, tokenize=False) for part in (prompt, whole) * 2],
        "another process": [again.apply_chat_template(part, tokenize=False) for part in (prompt, whole)],
    }
    in_turn = ["ub\1a", "ub\1ac\1"]
    expected = {"0.19": in_turn * 2, "another process": in_turn}
    for name, failed in {"a prompt that fails": [nothing], "a completion that fails": [prompt, nothing]}.items():
        with suppress(ValueError):
            for part in failed:
                failing.apply_chat_template(part)
        texts[name] = [failing.apply_chat_template(part) for part in (prompt, whole)]
        expected[name] = in_turn
    dicts = [view.apply_chat_template(part, return_dict=True) for part in (whole, whole)]
    texts["no prompt"] = [tokenizer.decode(encoded["input_ids"]) for encoded in dicts]
    expected["no prompt"] = in_turn[1:] * 2
    texts["the user's own"] = [view.apply_chat_template(prompt, tokenize=False, add_generation_prompt=False)]
    expected["the user's own"] = ["ub\1"]
    mistakes = [f"{name}: {texts[name]}" for name in expected if texts[name] != expected[name]]
    if type(again.__wrapped__) is not CharacterTokenizer or not view.__reduce_ex__(2)[1][1]:
        mistakes.append("what is pickled is another tokenizer, or has no digest")
    return mistakes
