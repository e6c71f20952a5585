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
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import Once, absent, argument, replaced_argument, shadowed
from ..model import Outcome, Verdict
from ..testing import CharacterTokenizer, sft_prepared, stream

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
    if settings.dataset_text_field != "text":
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
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
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
    mistakes = []
    question = {"question": "bad", "answer": "good"}
    if (texts := _tokenised(module, question)) != [_formatted(question)] * 2:
        mistakes.append(f"without a column of TRL's, {texts} are tokenised")
    handed_in = (stream([{"input_ids": [98, 97], "messages": conversation}]), SimpleNamespace(), _formatted)
    if (passed := tokenise_what_the_function_returns(_Trainer.prepare, _Trainer(), handed_in, {})) != handed_in:
        mistakes.append(f"of a tokenised dataset, {passed} are handed on")
    if (texts := _tokenised(module, {"content": "bad"}, None, dataset_text_field="content")) != ["bad"] * 2:
        mistakes.append(f"without a function, {texts} are tokenised")
    # Lists that are no conversation, and messages of the older form.
    older = [{"from": "user", "value": "bad"}]
    kinds = {"messages": conversation, "conversations": older, "chosen": [], "rejected": ["bad"], "prompt": "a"}
    preferred = {name: bool(_preferred_columns({name: value})) for name, value in kinds.items()}
    if [name for name, is_preferred in preferred.items() if not is_preferred] != ["chosen", "rejected"]:
        mistakes.append(f"TRL would prefer {preferred}")
    said: list[Any] = []
    settings = SimpleNamespace(dataset_text_field="text", completion_only_loss=True)
    with shadowed(_log, "warning", lambda *args: said.append(args)):
        for trainer in (one := _Trainer(), one, _Trainer()):
            dataset = stream([{"messages": conversation}])
            passed = tokenise_what_the_function_returns(trainer.prepare, trainer, (dataset, settings, _formatted), {})
            if passed != (dataset, settings, _formatted):
                mistakes.append(f"where completions alone are trained on, {passed} are handed on")
    if len(said) != 2 or "messages" not in said[0] or "completion_only_loss=True" not in said[0][-1]:
        mistakes.append(f"of two trainers it is said: {said}")
    return mistakes


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
