"""``apply_chat_template`` cuts the prompt twice, and the chosen answer after the first time only.

Since 0.19.0 (pull request 3522) the prompt is what its text has in common with that of prompt and chosen answer, and
then what this has in common with that of prompt and rejected answer. ``chosen`` is what follows on the first of the
two. 1.9.0 cuts the answers when the prompt is known (pull request 6433).

With the chosen answer as its only completion TRL returns the first prompt, so both together are the whole text.

The targets are the names in the modules of the trainers that have pairs: others call the function in each step.
From 0.29.0 on DPO renders only what has images, by ``apply_chat_template`` in its collator.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ...authoring import absent, act_of_this_call, argument, judge, replaced_argument
from ...model import Outcome, Verdict


def keep_the_whole_answer(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have the chosen answer begin where the prompt ends."""
    act = act_of_this_call()
    example = argument(wrapped, args, kwargs, "example")
    result = wrapped(*args, **kwargs)
    # What is no conversation is returned as it is.
    if result is example or not {"prompt", "chosen"} <= result.keys():
        return result
    alone = {name: value for name, value in example.items() if name not in ("chosen", "rejected")}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "example", {**alone, "completion": example["chosen"]})
    first = wrapped(*args, **kwargs)
    chosen = (first["prompt"] + first["completion"])[len(result["prompt"]) :]
    if chosen == result["chosen"]:
        return result
    act()
    return {**result, "chosen": chosen}


_PAIRS = (
    ("ab", "<t>cd", "ef"),
    ("g", "<t>h", "<x>ij"),
    ("kl", "<ty", "<zmn"),
    ("o", "pq", "<t>r"),
    ("st", "<t>u", "<t>vw"),
    ("x", "y", "z"),
)
"""Prompts, chosen and rejected answers. Of the first three the chosen answer has more in common with the template."""


class _Renderer:
    """A tokenizer whose generation prompt begins the answer. It keeps the texts that it has rendered."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tools: Any = None, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        beginning = f"{''.join(tools or ())}{kwargs.get('mark', '')}"
        turns = "".join(f"{message['role'][0]}:{message['content']};" for message in conversation)
        self.texts.append(f"{beginning}{turns}{'a:<t>' if add_generation_prompt else ''}")
        return self.texts[-1]


def chosen_answers_are_whole(module: ModuleType) -> Outcome:
    """Judge the texts of pairs, each character weighted by its place, and then compare them.

    Right is what follows on the prompt that both answers leave. Wrong is what follows on the prompt that the chosen
    answer leaves. Then what is no pair with a prompt is rendered.
    """
    names = ("maybe_apply_chat_template", "apply_chat_template")
    apply = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if apply is None or "takewhile" not in inspect.unwrap(apply).__globals__:
        return absent("no pairs are rendered here, or the template must not begin the answer")
    # The function behind the targets, which is never patched. The body of most targets only calls it.
    if inspect.unwrap(apply).__globals__["apply_chat_template"](_pair(*_PAIRS[0]), _Renderer())["chosen"] != "cd;":
        return absent("this release cuts the answers when the prompt is known")
    measured, right, wrong = [], [], []
    for prompt, *answers in _PAIRS:
        for example, options in _with_options(_pair(prompt, *answers)):
            renderer = _Renderer()
            measured.append(apply(example, renderer, **options))
            # What the patch renders is behind these.
            texts = renderer.texts[:3]
            left = _common(*texts)
            right.append({"prompt": texts[0][:left], "chosen": texts[1][left:], "rejected": texts[2][left:]})
            wrong.append({**right[-1], "chosen": texts[1][_common(*texts[:2]) :]})
    outcome = judge(_weighted(measured), right=_weighted(right), wrong=_weighted(wrong))
    if measured != (right if outcome.verdict is Verdict.FIXED else wrong):
        raise AssertionError(f"the texts are {measured}")
    if mistakes := list(_mistakes_in_others(apply, takes_texts=hasattr(module, names[0]))):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _common(*texts: str) -> int:
    """Return how many characters these texts have in common from the beginning."""
    places = zip(*texts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda characters: len({*characters}) == 1, places))


def _messages(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    answers = {"chosen": _messages("assistant", chosen), "rejected": _messages("assistant", rejected)}
    return {"prompt": _messages("user", prompt), **answers}


def _with_options(example: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Give the example as it is, with tools, and with arguments of the template, which not every release hands on."""
    yield {**example}, {}
    yield {**example}, {"tools": ["T", "T"]}
    yield {**example, "chat_template_kwargs": {"mark": "#"}}, {}


def _mistakes_in_others(apply: Callable[..., Any], *, takes_texts: bool) -> Iterator[str]:
    """Say what is wrong with the texts of examples without a prompt or without a pair, and with texts."""
    pair, completion = _pair("a", "<t>b", "c"), _messages("assistant", "d")
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"prompt": pair["prompt"]}, {"prompt": "u:a;a:<t>"}),
        ({"prompt": pair["prompt"], "completion": completion}, {"prompt": "u:a;a:", "completion": "d;"}),
        ({name: pair[name] for name in ("chosen", "rejected")}, {"chosen": "a:<t>b;", "rejected": "a:c;"}),
    ]
    if takes_texts:
        texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
        cases.append((texts, texts))
    for example, expected in cases:
        if (rendered := apply(example, _Renderer())) != expected:
            yield f"{example} is rendered as {rendered}, expected {expected}"


def _weighted(rendered: list[dict[str, str]]) -> float:
    characters = "".join(texts[name] for texts in rendered for name in ("prompt", "chosen", "rejected"))
    return float(sum(place * ord(character) for place, character in enumerate(characters, 1)))
