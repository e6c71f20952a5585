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
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...authoring import Call, WarnOnce, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, quick_sft_prepared

_KINDS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""The columns by which TRL recognises the kind of an example."""

_warn = WarnOnce()


@wrapper
def tokenise_what_the_function_returns(call: Call) -> Any:
    """Hide the columns that TRL would prefer to the formatted text from TRL, but not from the formatting function."""
    from datasets import Dataset, IterableDataset

    formatting_func, dataset, settings = (call[name] for name in ("formatting_func", "dataset", "args"))
    if formatting_func is None or not isinstance(dataset, (Dataset, IterableDataset)):
        return call()
    first = next(iter(dataset))
    if "input_ids" in first:
        return call()  # From 0.15.1 on TRL itself warns that a tokenised dataset is not formatted.
    hidden = _preferred_columns(first)
    if not hidden and settings.dataset_text_field == "text":
        return call()
    obstacle = _obstacle(dataset, settings) if hidden else None
    if obstacle is not None:
        message = "formatting_func is not applied: the dataset has the columns %s, which TRL tokenises instead, and %s"
        _warn(call.trainer, message, ", ".join(hidden), obstacle)
        return call()
    changed: dict[str, Any] = {}
    if hidden:
        original_names = {f"unformatted_{name}": name for name in hidden}

        def formatted(example: Mapping[str, Any]) -> Any:
            return formatting_func({original_names.get(name, name): example[name] for name in example})

        renamed = dataset.rename_columns({name: hidden_name for hidden_name, name in original_names.items()})
        changed = {"dataset": renamed, "formatting_func": formatted}
    # A change for the time of the call would not do: in 0.15 a stream reads the config when it is iterated.
    settings = copy.copy(settings)
    settings.dataset_text_field = "text"
    return call.with_(args=settings, **changed)()


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
    """Count the tokens of a function's text, three, for a conversation in a dataset with a text field of its own."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release takes the text of the formatting function and looks at no other column")
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}], "content": "d"}
    settings = {"dataset_text_field": "content", "completion_only_loss": False}
    (prepared,) = quick_sft_prepared(module, [row], CharacterTokenizer(), lambda example: "fff", **settings)
    return judge(prepared["input_ids"].count(ord("f")), right=3, wrong=0)
