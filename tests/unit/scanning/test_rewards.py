"""What the text of reward functions tells of the number of rewards is what they return when they run."""

from __future__ import annotations

import ast

import pytest

from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.trainer_calls import trainer_calls

EACH = {
    "a comprehension": "def f(completions, **kwargs):\n    return [len(x) for x in completions]",
    "a column": "def f(environments, **kwargs):\n    return [e.reward for e in environments]",
    "zip": "def f(completions, answer, **kwargs):\n    return [float(a == b) for a, b in zip(completions, answer)]",
    "enumerate": "def f(completions, **kwargs):\n    return [i for i, x in enumerate(completions)]",
    "a variable": "def f(completions, **kwargs):\n    found = [len(x) for x in completions]\n    return found",
    "a coroutine": "async def f(completions, **kwargs):\n    return [len(x) for x in completions]",
    "a loop": (
        "def f(completions, **kwargs):\n    found: list = []\n    for x in completions:\n        if x:\n"
        "            found.append(1.0)\n        elif kwargs:\n            found.append(None)\n        else:\n"
        "            found.append(0.0)\n    return found"
    ),
}
EACH |= {
    "a list of its own": (
        "def f(completions, answer, **kwargs):\n    texts = [x['content'] for x in completions]\n    found = []\n"
        "    for x, y in zip(texts, answer):\n        found.append(float(x == y))\n    return found"
    ),
    "a list that a loop fills": (
        "def f(completions, **kwargs):\n    texts = []\n    for x in completions:\n        texts.append(x)\n"
        "    return [len(x) for x in texts]"
    ),
}
UNKNOWN = {
    "a list of its own that is cut": (
        "def f(completions, **kwargs):\n    texts = [x for x in completions]\n    del texts[0]\n"
        "    return [len(x) for x in texts]"
    ),
    "a list that is not yet full": (
        "def f(completions, **kwargs):\n    texts = []\n    found = [len(x) for x in texts]\n"
        "    for x in completions:\n        texts.append(x)\n    return found"
    ),
    "a list of itself": "def f(completions, **kwargs):\n    found = [x for x in found]\n    return found",
    "one for all": "def f(completions, **kwargs):\n    return [float(len(completions))]",
    "a condition": "def f(completions, **kwargs):\n    return [len(x) for x in completions if x]",
    "two loops": "def f(completions, **kwargs):\n    return [y for x in completions for y in x]",
    "another list": "def f(completions, **kwargs):\n    return [x for x in kwargs['rewards']]",
    "a rebound list": "def f(texts, **kwargs):\n    texts = texts[:1]\n    return [x for x in texts]",
    "a list of TRL": "def f(completions, trainer_state, **kwargs):\n    return [x for x in trainer_state]",
    "an early end": "def f(texts, **kwargs):\n    if kwargs:\n        return [0.0]\n    return [x for x in texts]",
    "a changed variable": (
        "def f(completions, **kwargs):\n    found = [x for x in completions]\n    found.pop()\n    return found"
    ),
    "a branch without": (
        "def f(completions, **kwargs):\n    found = []\n    for x in completions:\n        if x:\n"
        "            found.append(1.0)\n    return found"
    ),
    "a loop that ends": (
        "def f(completions, **kwargs):\n    found = []\n    for x in completions:\n        found.append(1.0)\n"
        "        break\n    return found"
    ),
    "an inner loop": (
        "def f(completions, **kwargs):\n    found = []\n    for x in completions:\n        for y in x:\n"
        "            found.append(y)\n    return found"
    ),
    "an append in passing": (
        "def f(completions, **kwargs):\n    found = []\n    for x in completions:\n        found.append(1.0)\n"
        "        g(found.append(2))\n    return found"
    ),
    "another loop too": (
        "def f(completions, **kwargs):\n    found = []\n    for x in completions:\n        found.append(1.0)\n"
        "    for x in completions:\n        found.append(1.0)\n    return found"
    ),
    "a decorator": "@once\ndef f(completions, **kwargs):\n    return [x for x in completions]",
    "a generator": "def f(completions, **kwargs):\n    yield from completions",
    "one of two": "def f(texts):\n    return [0.0]\nif x:\n    def f(texts):\n        return [x for x in texts]",
    "no function": "f = made_elsewhere()",
}


def rewards(text: str, given: str = "f") -> object:
    call = f"trl.GRPOTrainer('m', reward_funcs={given})"
    (found,) = trainer_calls(ScriptBindings(ast.parse(f"import trl\n{text}\n{call}\n"))).calls
    return found.argument("reward_funcs.rewards").value


@pytest.mark.parametrize("name", EACH)
def test_a_function_with_a_reward_for_each_completion_is_seen(name: str) -> None:
    assert rewards(EACH[name]) == rewards(EACH[name], "[f, f]") == "each"


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_function_is_unknown(name: str) -> None:
    assert rewards(UNKNOWN[name]) is None
    assert rewards(f"{UNKNOWN[name]}\n{EACH['zip'].replace('def f', 'def g')}", "[g, f]") is None


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("trl.rewards.think_format_reward", "each"),
        ("'a/reward-model'", "each"),
        ("['a/reward-model', trl.rewards.accuracy_reward]", "each"),
        ("trl.rewards.get_soft_overlong_punishment(2, 1)", None),
        ("functools.partial(f, 1)", None),
        ("lambda completions: [1.0]", None),
        ("[]", None),
        ("[*others]", None),
    ],
)
def test_functions_of_trl_and_reward_models_give_one_for_each(given: str, value: str | None) -> None:
    assert rewards(f"import functools\n{EACH['zip']}", given) == value
