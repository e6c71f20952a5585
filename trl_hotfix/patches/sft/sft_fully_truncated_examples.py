"""SFT trains and evaluates on rows of which ``max_length`` leaves only what is masked.

1.9.0 drops them in ``_prepare_dataset``, when it has cut the rows and has labels (pull request 6320). Before:

- Up to 1.0.0rc1 ``truncate_dataset`` cuts all columns, and the collator makes labels of the masks.
- From 1.0.0 to 1.7.1 the collator cuts, unless it is without padding. From 1.7.0 on rows have labels before.
- 1.8.0 cuts them where 1.9.0 does.

The wrapper looks at the labels and masks of what the method returns, cut as the collator will. So with
``shuffle_dataset`` the rows that are left have another order than in 1.9.0. What a collator of the user's makes of the
masks is not known, and then nothing is dropped. ``_prepare_dataset`` does not know of it, so the constructor's wrapper
notes it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from ...authoring import absent, argument, has_own_collator, judge, module_of, note_own_collator, only_rows
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer


def note_the_collator(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and note before whether it is given a collator."""
    note_own_collator(wrapped, instance, args, kwargs)
    wrapped(*args, **kwargs)


def drop_rows_without_a_label(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Prepare a dataset, and drop its rows that are masked as far as they are kept."""
    settings, packing, name = (
        argument(wrapped, args, kwargs, parameter) for parameter in ("args", "packing", "dataset_name")
    )
    prepared, module = wrapped(*args, **kwargs), module_of(wrapped)
    if packing or settings.max_length is None or not _masks_and_cuts(instance, settings, module):
        return prepared
    masks = _masks(instance, next(iter(prepared), {}), module)
    if not masks:
        return prepared
    keeps_the_end = getattr(settings, "truncation_mode", "keep_start") == "keep_end"
    kept = slice(-settings.max_length, None) if keeps_the_end else slice(settings.max_length)

    def is_trained(row: Any) -> bool:
        columns = ([value != -100 if mask == "labels" else value for value in row[mask][kept]] for mask in masks)
        return any(all(bits) for bits in zip(*columns, strict=False))

    return only_rows(module, prepared, is_trained, settings, f"Dropping rows without a label from {name} dataset")


def _masks_and_cuts(trainer: Any, settings: Any, module: ModuleType) -> bool:
    """Return whether this trainer's collator is TRL's, which masks, and its rows are cut at ``max_length``."""
    fields = module.DataCollatorForLanguageModeling.__dataclass_fields__
    if has_own_collator(trainer):
        return False
    # Without padding, 0.17 and 0.18 have the collator of transformers, and that of 1.0.0 to 1.7.1 does not cut.
    return not settings.padding_free or ("padding_free" in fields and "max_length" not in fields)


def _masks(trainer: Any, row: Mapping[str, Any], module: ModuleType) -> list[str]:
    """Return the columns that tell which tokens of ``row`` are trained on. No column: all are."""
    fields = module.DataCollatorForLanguageModeling.__dataclass_fields__
    if "padding_free" not in fields:  # 0.17 and 0.18 have no other mask, and do not read labels.
        names = ["completion_mask"] * trainer.completion_only_loss
    elif "completion_only_loss" in fields:
        names = ["labels", *["completion_mask"] * trainer.completion_only_loss, "assistant_masks"]
    else:  # From 1.7.0 on the labels are made of the masks.
        names = ["labels"]
    return [name for name in names if name in row]


Row = dict[str, Any]

_LIMIT = 4
_MASKS = ("0011", "00001", "0101", "000000111", "1", "0000", "01111", "000110", "00000", "011100000")
"""The masks of rows. Of four nothing is left in the first ``_LIMIT`` tokens, of three in the last."""


def rows_have_a_label(module: ModuleType) -> Outcome:
    """Weigh the tokens of rows by their place, of a dataset to train on and of one to evaluate, and then compare them.

    Right are those of the rows that have a label, wrong those of all rows.
    """
    fields = getattr(getattr(module, "DataCollatorForLanguageModeling", None), "__dataclass_fields__", {})
    if "completion_only_loss" not in fields and "padding_free" not in fields:
        return absent("there is no loss of the completion alone")
    # Its constructor may be that of the release before.
    if "Dropping fully masked examples from " in _original(module).__code__.co_consts:
        return absent("this release drops these rows itself")
    with single_process(module):
        found = [_prepared(module, rows) for rows in (_rows(), _rows()[2:])]
        wrong = [[row["input_ids"][:_LIMIT] for row in rows] for rows in (_rows(), _rows()[2:])]
        right = [_with_a_label(rows) for rows in (_rows(), _rows()[2:])]
        outcome = judge(_weighted(found), right=_weighted(right), wrong=_weighted(wrong))
        if found != (right if outcome.verdict is Verdict.FIXED else wrong):
            raise AssertionError(f"the rows are {found}")
        if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes(module, fields))):
            raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes(module: ModuleType, fields: Mapping[str, Any]) -> Iterator[str]:
    """Say which rows are wrong: with other masks, with other settings, of a stream, or where nothing is to be done."""
    masked, short = _rows(), [row for row in _rows() if any(row["completion_mask"][:_LIMIT])]
    nothing = [row for row in _rows() if row not in short]
    without_masks = [{"input_ids": row["input_ids"]} for row in masked]
    of_turns = _rows("assistant_masks")
    labelled = [
        {"input_ids": ids, "labels": [token if bit else -100 for token, bit in zip(ids, bits, strict=True)]}
        for ids, bits in (row.values() for row in masked)
    ]
    # A token is trained on if both masks say so.
    both = [{**row, "assistant_masks": [*row["completion_mask"][1:], 1]} for row in masked]
    in_both = [
        row["input_ids"][:_LIMIT]
        for row in both
        if any(map(operator.and_, row["completion_mask"][:_LIMIT], row["assistant_masks"]))
    ]
    knows_turns = "padding_free" in fields
    cut_flat = knows_turns and "max_length" not in fields
    cases: dict[str, tuple[list[list[int]] | None, list[Row], dict[str, Any]]] = {
        "a stream": (_with_a_label(masked), masked, {"streaming": True}),
        "nothing to drop": (None, short, {}),
        "nothing to keep": ([], nothing, {}),
        "no masks": (None, without_masks, {}),
        "turns": (_with_a_label(masked) if knows_turns else None, of_turns, {"completion_only_loss": False}),
        "labels": (_with_a_label(masked) if knows_turns else None, labelled, {"completion_only_loss": False}),
        "both masks": (in_both if knows_turns else _with_a_label(masked), both, {}),
        "all tokens": (None, masked, {"completion_only_loss": False}),
        "no limit": (None, masked, {"max_length": None}),
        "packing": (None, masked, {"packing": True}),
        "no padding": (_with_a_label(masked) if cut_flat else None, masked, {"padding_free": True}),
        "a collator of the user's": (None, masked, {"data_collator": list}),
    }
    if "truncation_mode" in module.SFTConfig.__dataclass_fields__:
        end = slice(-_LIMIT, None)
        cases["the end is kept"] = (_with_a_label(masked, end), masked, {"truncation_mode": "keep_end"})
    for name, (expected, rows, settings) in cases.items():
        unpatched = _prepared(module, rows, method=_original(module), **settings)
        if (found := _prepared(module, rows, **settings)) != (unpatched if expected is None else expected):
            yield f"{name}: prepared are {found}, and not {unpatched if expected is None else expected}"


def _rows(column: str = "completion_mask") -> list[Row]:
    """Return rows of tokens, each of which is its own, and masks."""
    return [
        {"input_ids": [10 * number + place for place in range(len(mask))], column: list(map(int, mask))}
        for number, mask in enumerate(_MASKS, 1)
    ]


def _with_a_label(rows: list[Row], kept: slice = slice(_LIMIT)) -> list[list[int]]:
    return [row["input_ids"][kept] for row in rows if any(row["completion_mask"][kept])]


def _weighted(datasets: list[list[list[int]]]) -> float:
    tokens = [token for rows in datasets for row in rows for token in row]
    return float(sum(place * token for place, token in enumerate(tokens, 1)))


def _original(module: ModuleType) -> Any:
    """Return TRL's own method."""
    return inspect.unwrap(module.SFTTrainer._prepare_dataset)


def _prepared(
    module: ModuleType,
    rows: list[Row],
    *,
    method: Any = None,
    data_collator: Any = None,
    completion_only_loss: bool = True,
    streaming: bool = False,
    packing: bool = False,
    **settings: Any,
) -> list[list[int]]:
    """Return the tokens of rows as they are prepared, as far as they are kept."""
    usual = {"max_length": _LIMIT, "packing_strategy": "wrapped", "shuffle_dataset": False}
    args = default_arguments(module.SFTConfig, **{**usual, **settings})
    tokenizer = CharacterTokenizer()
    known = {"completion_only_loss": completion_only_loss, "chat_template": None, "_is_vlm": False}
    trainer = stub_trainer(module.SFTTrainer, args, _tokenizer=tokenizer, **known)
    note_the_collator(_given, trainer, (), {"data_collator": data_collator})
    prepare = functools.partial(method or module.SFTTrainer._prepare_dataset, trainer)
    prepared = prepare(stream(rows) if streaming else _in_memory(rows), tokenizer, args, packing, None, "train")
    keeps_the_end = settings.get("truncation_mode") == "keep_end"
    kept = slice(-_LIMIT, None) if keeps_the_end else slice(args.max_length)
    return [row["input_ids"][kept] for row in prepared]


def _given(data_collator: Any = None) -> None:
    """Have the argument of the constructor that the wrapper reads."""


def _in_memory(rows: list[Row]) -> Any:
    """Return a dataset that is mapped and filtered without a hash, a cache or a progress bar."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    class InMemory(Dataset):  # type: ignore[misc]
        def map(
            self,
            function: Callable[..., Any],
            fn_kwargs: Mapping[str, Any] = MappingProxyType({}),
            remove_columns: Sequence[str] = (),
            **options: Any,
        ) -> Any:
            if self.format["type"] == "arrow":
                return _in_memory(function(self[:], **fn_kwargs).to_pylist())
            mapped = [{**row, **function(row, **fn_kwargs)} for row in self]
            return _in_memory([{name: row[name] for name in row if name not in remove_columns} for row in mapped])

        def filter(self, function: Callable[..., Any], **options: Any) -> Any:
            return _in_memory([row for row in self if function(row)])

    return InMemory(InMemoryTable.from_pylist(rows), fingerprint="in memory")
