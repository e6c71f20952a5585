"""SFT: what ``formatting_func`` returns is not what is tokenised.

Up to 0.14 the text was the formatting function's, whatever columns the dataset had. Since 0.15.0 ``_prepare_dataset``
puts it into a column ``text``, keeps all others, and then looks at the columns as if there were no such function:
``messages`` or ``conversations`` go through the chat template, which either writes over ``text`` or does not look at
it; a ``prompt`` makes the example one of a prompt and a completion; and with another ``dataset_text_field`` that column
is tokenised. Nothing is said: the model is trained on texts that the user has never asked for. If there is a ``prompt``
and no ``completion``, or no column of the name of ``dataset_text_field``, it ends with a ``KeyError``.

Here the columns that would win are renamed before the call and have their own names again in the example that the
formatting function is given, and the method is given a config whose ``dataset_text_field`` is ``text``. The rest is
TRL's.

With ``assistant_only_loss=True``, or ``completion_only_loss=True``, a formatted text has no such part. TRL raises an
exception where it sees that; where it does not, it leaves the formatting function out, and so it stays, with a warning.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, replaced_argument
from ..model import Outcome, Verdict
from ..stubs import CharacterTokenizer, sft_prepared

_KINDS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""The columns by which TRL tells what kind of an example it has."""

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def tokenise_what_the_function_returns(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Hide the columns that would win over the formatting function's, from TRL and not from the function."""
    from datasets import Dataset, IterableDataset

    formatting_func = argument(wrapped, args, kwargs, "formatting_func")
    dataset = argument(wrapped, args, kwargs, "dataset")
    settings = argument(wrapped, args, kwargs, "args")
    if formatting_func is None or not isinstance(dataset, (Dataset, IterableDataset)):
        return wrapped(*args, **kwargs)
    first = next(iter(dataset))
    if "input_ids" in first:
        return wrapped(*args, **kwargs)  # tokenised already: TRL says that there is nothing to format
    hidden = _columns_that_win(first)
    if not hidden and settings.dataset_text_field == "text":
        return wrapped(*args, **kwargs)
    why = _why_not(dataset, settings) if hidden else None
    if why is not None:
        if instance not in _warned:
            _warned.add(instance)
            logging.getLogger("trl_hotfix").warning(
                "formatting_func is not applied: the dataset has the columns %s, which TRL tokenises instead, and %s",
                ", ".join(hidden),
                why,
            )
        return wrapped(*args, **kwargs)
    if hidden:
        shown = {f"unformatted_{name}": name for name in hidden}

        def formatted(example: Mapping[str, Any]) -> Any:
            return formatting_func({shown.get(name, name): example[name] for name in example})

        dataset = dataset.rename_columns({name: hiding for hiding, name in shown.items()})
        args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", dataset)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "formatting_func", formatted)
    if settings.dataset_text_field != "text":
        # A copy, and not for the time of the call: in 0.15 a stream looks at it when it is read.
        settings = copy.copy(settings)
        settings.dataset_text_field = "text"
        args, kwargs = replaced_argument(wrapped, args, kwargs, "args", settings)
    return wrapped(*args, **kwargs)


def _columns_that_win(first: Mapping[str, Any]) -> list[str]:
    there = [name for name in _KINDS if name in first]
    return there if "prompt" in there or any(_is_conversation(first[name]) for name in there) else []


def _is_conversation(value: Any) -> bool:
    """A list of messages, of whichever of the two forms: role and content, or from and value."""
    message = value[0] if isinstance(value, list) and value else None
    return isinstance(message, dict) and ("role" in message or "from" in message)


def _why_not(dataset: Any, settings: Any) -> str | None:
    """Why the function cannot be applied to this dataset, with what to do about it; None if it can."""
    for name in ("assistant_only_loss", "completion_only_loss"):
        if getattr(settings, name, None):
            return f"a formatted text has no part for {name}=True. Leave out one of the two"
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return "its with_transform() knows them by their names. Format the dataset yourself, by map()"
    return None


def function_wins(module: ModuleType) -> Outcome:
    """The texts that are tokenised: of conversations, of prompts and completions, and with another text field."""
    if not hasattr(module.SFTTrainer, "_prepare_dataset") or not _has_settings(module):
        return absent("this release takes the text of the formatting function and looks at no other column")

    words = CharacterTokenizer()
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
        name: words.decode(
            sft_prepared(
                module,
                [row],
                words,
                formatting_func,
                dataset_text_field="content" if name == "field" else "text",
                completion_only_loss=False,
            )[0]["input_ids"]
        )
        for name, row in rows.items()
    }
    taken = {name: text.startswith(f"good {len(rows[name])}") for name, text in tokenised.items()}
    if len(set(taken.values())) > 1:
        raise AssertionError(f"the function is taken here and ignored there: {tokenised}")
    return Outcome(Verdict.FIXED if all(taken.values()) else Verdict.REPRODUCED, {"tokenised": tokenised})


def _has_settings(module: ModuleType) -> bool:
    """Is ``_prepare_dataset`` that of 0.15.0 and later, which is given an ``SFTConfig``?"""
    return "args" in module.SFTTrainer._prepare_dataset.__code__.co_varnames
