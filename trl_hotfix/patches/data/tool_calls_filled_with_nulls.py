"""Trainers render the nulls that Arrow adds to the tool calls, and to the tools, of a row.

A column of structs has the fields of all of its rows, so the arguments of one tool are null in the calls of every
other, and chat templates write the null. From 0.19.0 to 1.0.0rc1 SFT, and later Reward and DPO, read datasets, but not
streams, through ``remove_none_values``. 1.0.0 (pull request 5376) leaves that to the user, since ``datasets`` 4.7 has a
Json type. But ``Dataset.from_list``, pandas and Parquet still make structs, and SFT refuses datasets with a transform
since 1.10.

Rows that are mapped go through Arrow again, which adds the nulls again. So the chat template is the place, and TRL gets
a view of the tokenizer. In a field of type Json a null is the user's, and stays.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType, ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, pickled_as_made, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    StopConstruction,
    absent_if_reexported,
    default_arguments,
    single_process,
    stub_trainer,
    trainer_and_config,
)

_COLUMNS = MappingProxyType(
    {
        "GOLD": "prompt completion",
        "SFT": "messages",
        "DPO": "prompt chosen rejected",
        "KTO": "prompt completion",
        "Reward": "chosen rejected",
        "TPO": "prompt chosen rejected reference",
    }
)
"""The columns of messages in the rows of each trainer. GOLD's module has SFT's trainer too."""


@wrapper
def drop_unless_formatted(call: Call) -> Any:
    """Do the same in SFT, unless the rows are for a function of the user's."""
    return call() if call["formatting_func"] is not None else drop_what_arrow_adds(call)


@wrapper
def drop_what_arrow_adds(call: Call) -> Any:
    """Prepare a dataset whose tool calls or tools are structs with nulls by a view of the tokenizer."""
    from datasets import Dataset

    dataset = call["dataset"]
    # SFT may be given a ConstantLengthDataset, which has no features. A stream has None if it knows none.
    features = getattr(dataset, "features", None) or {}
    structs = [name for name in features if _has_structs(name, features[name])]
    if isinstance(dataset, Dataset):
        drops_nulls = hasattr(module_of(call.__wrapped__), "remove_none_values")
        structs = [name for name in structs if not drops_nulls and _has_nulls(dataset, name)]
    if not structs:
        return call()
    calls = [_item(features[name])["tool_calls"] for name in structs if name != "tools"]
    view = _without_nulls(call["processing_class"], calls[0] if calls else None, features.get("tools"))
    return call.with_(processing_class=view)()


def _item(feature: Any) -> Any:
    """Return the type of the items of a list, or None. ``datasets`` has several types of lists."""
    return next(iter(feature)) if isinstance(feature, list) else getattr(feature, "feature", None)


def _has_structs(name: str, feature: Any) -> bool:
    """Return whether this column has tools, or messages with tool calls, and those are structs."""
    item = _item(feature)
    if name != "tools":
        item = _item(item.get("tool_calls")) if isinstance(item, Mapping) else None
    return isinstance(item, Mapping)


def _has_nulls(dataset: Any, name: str) -> bool:
    """Return whether a struct in the tools, or in the tool calls, of this column has a null."""
    from pyarrow import types

    def has_nulls(array: Any) -> bool:
        if types.is_struct(array.type):
            return any(field.null_count or has_nulls(field) for field in array.flatten())
        return (types.is_list(array.type) or types.is_large_list(array.type)) and has_nulls(array.flatten())

    items = [chunk.flatten() for chunk in dataset.data.column(name).chunks]
    return any(has_nulls(item if name == "tools" else item.field("tool_calls")) for item in items)


def _without_nulls(processing_class: Any, calls: Any, tools: Any, code: str = "") -> Any:
    """Return a view of ``processing_class`` whose chat template is given no nulls in structs.

    ``calls`` and ``tools`` are the types of the tool calls of a message and of the tools, or None if they may stay.
    """
    import wrapt

    def without_nulls(value: Any, feature: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(part, _item(feature)) for part in value]
        if isinstance(value, dict) and isinstance(feature, Mapping):
            return {key: without_nulls(part, feature.get(key)) for key, part in value.items() if part is not None}
        return value

    def of_message(message: Any) -> Any:
        if not isinstance(message, dict) or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": without_nulls(message["tool_calls"], calls)}

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_without_nulls, self.__wrapped__, calls, tools)

        def __deepcopy__(self, memo: Any) -> Any:
            # KTO concatenates streams, which datasets copies with what their functions are given.
            return _without_nulls(copy.deepcopy(self.__wrapped__, memo), calls, tools)

        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            if "tools" in kwargs:
                kwargs["tools"] = without_nulls(kwargs["tools"], tools)
            return self.__wrapped__.apply_chat_template([of_message(each) for each in conversation], *args, **kwargs)

    return View(processing_class)


def calls_have_no_nulls(module: ModuleType) -> Outcome:
    """Count the nulls in the tool call that the chat template is given of a stream of one row."""
    from datasets import IterableDataset

    struct = {"function": {"name": "", "arguments": {"a": "", "b": ""}}}

    class Rows(IterableDataset):  # type: ignore[misc]
        """One row, which is mapped at once. A dataset of ``datasets`` takes 100 milliseconds for all maps."""

        column_names = property(lambda self: list(self.row))
        features = property(lambda self: {name: [{"tool_calls": [struct]}] for name in self.row})

        def __init__(self, row: dict[str, Any]) -> None:
            self.row = row

        def __iter__(self) -> Any:
            return iter([dict(self.row)])

        def map(self, function: Any, fn_kwargs: Any = MappingProxyType({}), **options: Any) -> Any:
            return Rows(*({**row, **function(row, **fn_kwargs)} for row in self))

    method = next(name for name in _COLUMNS if hasattr(module, f"{name}Trainer"))
    trainer_class, config_class = trainer_and_config(module, method)
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    if prepare is None or "dataset_name" not in inspect.signature(prepare).parameters:
        return absent("this release has no such method, or one for rows of text")
    if reexported := absent_if_reexported(module, prepare):
        return reexported
    call = {"function": {"name": "f", "arguments": {"a": "1", "b": None}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    said = [{"role": "user", "content": "a"}, calling]
    given: list[Any] = []

    def render(messages: Any, **options: Any) -> None:
        given.extend(messages)
        raise StopConstruction

    tokenizer, args = CharacterTokenizer(), default_arguments(config_class)
    vars(tokenizer).update(apply_chat_template=render, backend_tokenizer=None)
    of_gold = {"use_uld_loss": False, "teacher_tokenizer": None, "_is_vision_dataset": False}
    trainer = stub_trainer(trainer_class, args, chat_template=None, _is_vlm=False, _tokenizer=tokenizer, **of_gold)
    known = {"packing": False, "formatting_func": None}
    options = {name: known[name] for name in known if name in inspect.signature(prepare).parameters}
    rows = Rows(dict.fromkeys(_COLUMNS[method].split(), said))
    with single_process(module), suppress(StopConstruction):
        trainer._prepare_dataset(rows, tokenizer, args, dataset_name="train", **options)
    arguments = given[1]["tool_calls"][0]["function"]["arguments"]
    return judge(list(arguments.values()).count(None), right=0, wrong=1)
