"""SFT tokenises columns of the dataset instead of the text that ``formatting_func`` returns.

Up to 0.14 the text was the formatting function's, whatever columns the dataset had. Since 0.15.0 ``_prepare_dataset``
puts it into a column ``text``, keeps all other columns, and then handles the example as if there were no such function:
``messages`` or ``conversations`` go through the chat template, which either overwrites ``text`` or ignores it; a
``prompt`` makes the example one of a prompt and a completion; and with another ``dataset_text_field`` that column is
tokenised.

The wrapper hides such columns from TRL and leaves the rest to it. ``dataset_text_field`` is changed in a copy of the
config.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from operator import is_
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, argument, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, recorded_warnings, sft_prepared, stream

_KINDS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""The columns by which TRL recognises the kind of an example."""

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


def tokenise_what_the_function_returns(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Hide the columns that TRL would prefer to the formatted text from TRL, but not from the formatting function."""
    from datasets import Dataset, IterableDataset

    formatting_func = argument(wrapped, args, kwargs, "formatting_func")
    dataset = argument(wrapped, args, kwargs, "dataset")
    settings = argument(wrapped, args, kwargs, "args")
    if formatting_func is None or not isinstance(dataset, (Dataset, IterableDataset)):
        return wrapped(*args, **kwargs)
    first = next(iter(dataset))
    if "input_ids" in first:
        return wrapped(*args, **kwargs)  # From 0.15.1 on TRL itself warns that a tokenised dataset is not formatted.
    hidden = _preferred_columns(first)
    if not hidden and settings.dataset_text_field == "text":
        return wrapped(*args, **kwargs)
    obstacle = _obstacle(dataset, settings) if hidden else None
    if obstacle is not None:
        if _first_warning(instance):
            _log.warning(
                "formatting_func is not applied: the dataset has the columns %s, which TRL tokenises instead, and %s",
                ", ".join(hidden),
                obstacle,
            )
        return wrapped(*args, **kwargs)
    if hidden:
        original_names = {f"unformatted_{name}": name for name in hidden}

        def formatted(example: Mapping[str, Any]) -> Any:
            return formatting_func({original_names.get(name, name): example[name] for name in example})

        dataset = dataset.rename_columns({name: hidden_name for hidden_name, name in original_names.items()})
        args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", dataset)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "formatting_func", formatted)
    # A change for the time of the call would not do: in 0.15 a stream reads the config when it is iterated.
    settings = copy.copy(settings)
    settings.dataset_text_field = "text"
    args, kwargs = replaced_argument(wrapped, args, kwargs, "args", settings)
    return wrapped(*args, **kwargs)


def _preferred_columns(first: Mapping[str, Any]) -> list[str]:
    """Return the columns that TRL would tokenise instead of ``text``."""
    columns = [name for name in _KINDS if name in first]
    return columns if "prompt" in columns or any(_is_conversation(first[name]) for name in columns) else []


def _is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages of either form: role and content, or from and value."""
    message = value[0] if isinstance(value, list) and value else None
    return isinstance(message, dict) and ("role" in message or "from" in message)


def _obstacle(dataset: Any, settings: Any) -> str | None:
    """Return why the function cannot be applied to this dataset and what to do about it; None if it can."""
    for name in ("assistant_only_loss", "completion_only_loss"):
        if getattr(settings, name, None):
            return f"a formatted text has no part for {name}=True. Leave out one of the two"
    if getattr(dataset, "format", {}).get("type") == "custom":
        return "its with_transform() knows them by their names. Format the dataset yourself, by map()"
    return None


def function_wins(module: ModuleType) -> Outcome:
    """Check which texts are tokenised: for conversations, for prompts and completions, and with another text field."""
    if not hasattr(module.SFTTrainer, "_prepare_dataset") or not _takes_config(module):
        return absent("this release takes the text of the formatting function and looks at no other column")
    message = {"role": "user", "content": "bad"}
    conversation = [message, {**message, "role": "assistant"}]
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "messages": ({"messages": conversation}, {}),
        "prompt": ({"prompt": "ba", "completion": "d", "other": "bad"}, {}),
        "field": ({"content": "bad"}, {"dataset_text_field": "content"}),
        "messages and field": ({"messages": conversation, "content": "bad"}, {"dataset_text_field": "content"}),
    }
    texts = {name: _tokenised(module, row, **settings) for name, (row, settings) in rows.items()}
    if not any(text.startswith("good") for two in texts.values() for text in two):
        return Outcome(Verdict.REPRODUCED, {"tokenised": texts})
    # The function sees all columns under their own names.
    mistakes = [
        f"{name}: {texts[name]} are tokenised"
        for name, (row, _) in rows.items()
        if texts[name] != [_formatted(row), _formatted(row)]
    ]
    mistakes += _mistakes_elsewhere(module, conversation)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"tokenised": texts})


def _mistakes_elsewhere(module: ModuleType, conversation: list[dict[str, str]]) -> list[str]:
    """Return what is wrong where TRL takes the text anyway, and where the function cannot be applied."""
    from datasets import Dataset

    mistakes = []
    question = {"question": "bad", "answer": "good"}
    if (texts := _tokenised(module, question)) != [_formatted(question)] * 2:
        mistakes.append(f"without a column of TRL's, {texts} are tokenised")
    if (texts := _tokenised(module, {"content": "bad"}, None, dataset_text_field="content")) != ["bad"] * 2:
        mistakes.append(f"without a function, {texts} are tokenised")
    # Lists that are no conversation, and messages of the older form.
    kinds: dict[str, Any] = {
        "messages": [*conversation, {}],
        "conversations": [{"from": "user", "value": "bad"}],
        "chosen": [],
        "rejected": ["bad"],
        "completion": [{"type": "text"}],
        "prompt": "a",
    }
    preferred = [name for name, value in kinds.items() if _preferred_columns({name: value})]
    if preferred != ["messages", "conversations", "prompt"] or _preferred_columns({"completion": {"role": "user"}}):
        mistakes.append(f"TRL would prefer {preferred}")
    messages, settings = {"messages": conversation}, SimpleNamespace(dataset_text_field="text")
    handed_in: dict[str, tuple[Any, Any]] = {
        "a tokenised dataset": (stream([{"input_ids": [98, 97], **messages}]), SimpleNamespace()),
        "what is no dataset": ([messages], settings),
        "a dataset without a column of TRL's": (stream([question]), settings),
    }
    for name, passed in handed_in.items():
        if not _hands_on(_Trainer(), *passed):
            mistakes.append(f"{name} is not handed on as it is")
    # With a text field alone, nothing is hidden.
    dataset, settings = stream([{"content": "bad"}]), SimpleNamespace(dataset_text_field="content")
    settings.completion_only_loss = True
    passed_on = tokenise_what_the_function_returns(_Trainer.prepare, _Trainer(), (dataset, settings, _formatted), {})
    text_fields = settings.dataset_text_field, passed_on[1].dataset_text_field
    if passed_on[0] is not dataset or passed_on[2] is not _formatted or text_fields != ("content", "text"):
        mistakes.append(f"of a text field, {passed_on} are handed on, and the settings are {settings}")
    transformed = Dataset.from_list([messages]).with_transform(lambda rows: rows)
    obstacles = {"completion_only_loss=True": stream([messages]), "with_transform()": transformed}
    for obstacle, dataset in obstacles.items():
        settings = SimpleNamespace(dataset_text_field="text", completion_only_loss=dataset is not transformed)
        one = _Trainer()
        with recorded_warnings() as warned:
            handed_on = [_hands_on(trainer, dataset, settings) for trainer in (one, one, _Trainer())]
        if not all(handed_on) or ["columns messages, " in text and obstacle in text for text in warned] != [True] * 2:
            mistakes.append(f"with {obstacle}, the same is handed on: {handed_on}, and two trainers warn: {warned}")
    return mistakes


def _hands_on(trainer: Any, dataset: Any, settings: Any) -> bool:
    """Return whether the method is called with the very dataset, config and function."""
    given = dataset, settings, _formatted
    passed = tokenise_what_the_function_returns(_Trainer.prepare, trainer, given, {})
    return all(map(is_, passed, given))


class _Trainer:
    """It can be referred to weakly, as a trainer can."""

    @staticmethod
    def prepare(dataset: Any, args: Any, formatting_func: Any) -> tuple[Any, Any, Any]:
        return dataset, args, formatting_func


def _formatted(example: Mapping[str, Any]) -> str:
    return f"good {sorted(example)}"


def _tokenised(module: ModuleType, row: Mapping[str, Any], function: Any = _formatted, **settings: Any) -> list[str]:
    """Return the texts that are tokenised of two rows like this one, without the end of sequence."""
    tokenizer = CharacterTokenizer()
    settings = {"dataset_text_field": "text", "completion_only_loss": False, **settings}
    rows = sft_prepared(module, [dict(row), dict(row)], tokenizer, function, **settings)
    return [tokenizer.decode(prepared["input_ids"]).removesuffix(tokenizer.eos_token) for prepared in rows]


def _takes_config(module: ModuleType) -> bool:
    """Return whether ``_prepare_dataset`` is given an ``SFTConfig``, as from 0.15.0 on."""
    return "args" in inspect.signature(module.SFTTrainer._prepare_dataset).parameters
