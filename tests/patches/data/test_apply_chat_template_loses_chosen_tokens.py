"""Prompt and chosen answer together are the whole text, in the module of each trainer that renders pairs.

The generation prompt of the chat template here begins the answer with ``<t>``.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates

import tiny

ID = "apply-chat-template-loses-chosen-tokens"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = [f"{target.module}:{target.attribute}" for target in gates.targets_here(PATCH)]

PAIRS = (
    ("ab", "<t>cd", "ef"),
    ("g", "<t>h", "<x>ij"),
    ("kl", "<ty", "<zmn"),
    ("o", "pq", "<t>r"),
    ("st", "<t>u", "<t>vw"),
    ("x", "y", "z"),
)
"""Prompts, chosen and rejected answers. Of the first three the chosen answer has more in common with the template."""

LOST = (3, 2, 1, 0, 0, 0)
"""How many characters of the chosen answer TRL loses."""

OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tools": ({}, {"tools": ["T", "T"]}),
    "template arguments": ({"chat_template_kwargs": {"mark": "#"}}, {}),
}
"""What a row has besides, and what the caller hands on. Not every release hands the arguments of a row on."""


class Renderer:
    """A tokenizer that keeps the texts that it has rendered."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        beginning = f"{''.join(tools or ())}{kwargs.get('mark', '')}"
        turns = "".join(f"{message['role'][0]}:{message['content']};" for message in conversation)
        self.texts.append(f"{beginning}{turns}{'a:<t>' if add_generation_prompt else ''}")
        return self.texts[-1]


class Target:
    """The function of a module, which is looked up in each call: a test may have the patch off."""

    def __init__(self, target: str) -> None:
        module, self.attribute = target.split(":")
        self.module = importlib.import_module(module)
        self.takes_texts = self.attribute == "maybe_apply_chat_template"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.module, self.attribute)

    @property
    def names(self) -> list[str]:
        return [*inspect.signature(self.function).parameters]


@pytest.fixture(params=TARGETS)
def apply(request: pytest.FixtureRequest) -> Target:
    return Target(request.param)


def message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    answers = {"chosen": message("assistant", chosen), "rejected": message("assistant", rejected)}
    return {"prompt": message("user", prompt), **answers}


def in_common(*texts: str) -> int:
    return len([*itertools.takewhile(lambda characters: len({*characters}) == 1, zip(*texts, strict=False))])


def by_formula(texts: list[str], lost: int = 0) -> dict[str, str]:
    """Return the right columns of the texts of the prompt and of both answers, or those of which some are lost."""
    prompt, with_chosen, with_rejected = texts
    left = in_common(*texts)
    return {"prompt": prompt[:left], "chosen": with_chosen[left + lost :], "rejected": with_rejected[left:]}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("texts", "lost"), zip(PAIRS, LOST, strict=True), ids=[chosen for _, chosen, _ in PAIRS])
def test_the_chosen_answer_begins_where_the_prompt_ends(
    apply: Target, texts: tuple[str, str, str], lost: int, option: str
) -> None:
    columns, handed_on = OPTIONS[option]
    example, renderer = {**pair(*texts), **columns}, Renderer()
    before = copy.deepcopy(example)
    with tiny.counted(ID) as counts:
        assert apply(example, renderer, **handed_on) == by_formula(renderer.texts[:3])
        assert counts().acted == (lost > 0)
    assert example == before


@pytest.mark.parametrize("option", OPTIONS)
def test_trl_loses_the_beginning(apply: Target, option: str, switch: Any) -> None:
    columns, handed_on = OPTIONS[option]
    with switch.off():
        for texts, lost in zip(PAIRS, LOST, strict=True):
            renderer = Renderer()
            rendered = apply({**pair(*texts), **columns}, renderer, **handed_on)
            assert rendered == by_formula(renderer.texts, lost)


def test_the_chosen_answer_is_rendered_as_the_rest_is(apply: Target) -> None:
    renderer = Renderer()
    apply({**pair(*PAIRS[0]), "chat_template_kwargs": {"mark": "#"}}, renderer, tools=["T"])
    *others, prompt, whole = renderer.texts
    assert (prompt, whole) == tuple(others[:2])


def test_arguments_may_have_their_names(apply: Target) -> None:
    renderer = Renderer()
    arguments = dict(zip(apply.names, (pair(*PAIRS[0]), renderer, ["T"]), strict=False))
    assert apply(**arguments) == by_formula(renderer.texts[:3])
    assert renderer.texts[0].startswith("T")


def test_each_row_of_a_dataset_has_its_whole_answer(apply: Target) -> None:
    expected = []
    for texts in PAIRS:
        renderer = Renderer()
        apply(pair(*texts), renderer)
        expected.append(by_formula(renderer.texts[:3]))
    dataset = Dataset.from_list([pair(*texts) for texts in PAIRS])
    assert dataset.map(apply.function, fn_kwargs={apply.names[1]: Renderer()}).to_list() == expected


ONE = pair("a", "<t>b", "c")
PROMPT, PAIR = {"prompt": ONE["prompt"]}, {name: ONE[name] for name in ("chosen", "rejected")}
COMPLETION = {"completion": message("assistant", "d")}


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (PROMPT, {"prompt": "u:a;a:<t>"}),
        (PROMPT | COMPLETION, {"prompt": "u:a;a:", "completion": "d;"}),
        (PROMPT | COMPLETION | {"label": True}, {"prompt": "u:a;a:", "completion": "d;", "label": True}),
        (PAIR, {"chosen": "a:<t>b;", "rejected": "a:c;"}),
        ({"messages": ONE["prompt"] + ONE["chosen"]}, {"text": "u:a;a:<t>b;"}),
    ],
    ids=["prompt", "completion", "unpaired", "pair without a prompt", "messages"],
)
def test_what_is_no_pair_with_a_prompt_stays(apply: Target, example: dict[str, Any], expected: dict[str, Any]) -> None:
    renderer = Renderer()
    with tiny.counted(ID) as counts:
        assert apply(example, renderer) == expected
        assert not counts().acted
    # Nothing is rendered once more.
    assert len(renderer.texts) == (2 if len(example) > 1 else 1)


def test_texts_are_returned_as_they_are(apply: Target) -> None:
    if not apply.takes_texts:
        pytest.skip("the function of this module is given conversations only")
    texts, renderer = {"prompt": "a", "chosen": "b", "rejected": "c"}, Renderer()
    with tiny.counted(ID) as counts:
        assert apply(texts, renderer) is texts
        assert not counts().acted
    assert not renderer.texts
