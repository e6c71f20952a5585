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
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, replaced_argument
from ..model import Outcome, Verdict
from ..testing import CharacterTokenizer, sft_prepared

_KINDS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""The columns by which TRL recognises the kind of an example."""

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


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
        return wrapped(*args, **kwargs)  # TRL itself warns that a tokenised dataset is not formatted.
    hidden = _preferred_columns(first)
    if not hidden and settings.dataset_text_field == "text":
        return wrapped(*args, **kwargs)
    obstacle = _obstacle(dataset, settings) if hidden else None
    if obstacle is not None:
        if instance not in _warned:
            _warned.add(instance)
            logging.getLogger("trl_hotfix").warning(
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

    tokenizer = CharacterTokenizer()
    message = {"role": "user", "content": "bad"}
    conversation: dict[str, Any] = {"messages": [message, {**message, "role": "assistant"}]}
    rows: dict[str, dict[str, Any]] = {
        "messages": conversation,
        "prompt": {"prompt": "ba", "completion": "d"},
        "field": {"content": "bad"},
    }

    def formatting_func(example: Mapping[str, Any]) -> str:
        return f"good {len(example)}"

    tokenised = {
        name: tokenizer.decode(
            sft_prepared(
                module,
                [row],
                tokenizer,
                formatting_func,
                dataset_text_field="content" if name == "field" else "text",
                completion_only_loss=False,
            )[0]["input_ids"]
        )
        for name, row in rows.items()
    }
    is_formatted = {name: text.startswith(f"good {len(rows[name])}") for name, text in tokenised.items()}
    if len(set(is_formatted.values())) > 1:
        raise AssertionError(f"the function is taken here and ignored there: {tokenised}")
    return Outcome(Verdict.FIXED if all(is_formatted.values()) else Verdict.REPRODUCED, {"tokenised": tokenised})


def _takes_config(module: ModuleType) -> bool:
    """Return whether ``_prepare_dataset`` is given an ``SFTConfig``, as from 0.15.0 on."""
    return "args" in inspect.signature(module.SFTTrainer._prepare_dataset).parameters
