"""DPO and KTO train on rows of which ``max_length`` leaves the prompt alone.

DPO's refactoring (0.29.0, pull request 3906) and that of KTO (1.3.0) dropped ``max_prompt_length``. What is kept of a
row are its first ``max_length`` tokens: the collator cuts, and in DPO up to 1.0.0rc1 the trainer, whatever the
collator. 1.9.0 drops these rows at the end of ``_prepare_dataset``, and KTO's before it makes the mismatched
completions of the KL divergence (pull request 6321).

So the wrapper takes them out of what the method returns. KTO's rows are then prepared once more without them: the
completion that a row has for the KL divergence is that of the row before, within batches. A collator of the user's may
cut nothing, and then nothing is dropped. ``_prepare_dataset`` does not know of it, so the constructor's wrapper notes
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from ...authoring import (
    absent,
    argument,
    has_own_collator,
    judge,
    module_of,
    note_own_collator,
    only_rows,
    replaced_argument,
)
from ...model import Outcome, Verdict
from ...testing import constructed, default_arguments, single_process, stream, tiny_attention_model


def note_the_collator(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and note before whether it is given a collator."""
    note_own_collator(wrapped, instance, args, kwargs)
    wrapped(*args, **kwargs)


def drop_rows_without_an_answer(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Prepare a dataset without the rows whose prompt fills ``max_length``."""
    settings, name = (argument(wrapped, args, kwargs, parameter) for parameter in ("args", "dataset_name"))
    prepared, limit = wrapped(*args, **kwargs), _limit(instance, settings)
    if limit is None:
        return prepared

    def has_room(row: Any) -> bool:
        return len(row["prompt_ids"]) < limit

    doing = f"Dropping rows without an answer from {name} dataset"
    kept = only_rows(module_of(wrapped), prepared, has_room, settings, doing)
    if kept is prepared or "KL_completion_ids" not in next(iter(kept), ()):
        return kept
    args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", kept.remove_columns(["KL_completion_ids"]))
    return wrapped(*args, **kwargs)


def _limit(trainer: Any, settings: Any) -> int | None:
    """Return how many tokens of a row are kept, from its start on, or None if what is kept has the answer's end."""
    # DPO of 0.29 cuts what a collator of the user's returns, too.
    if has_own_collator(trainer) and not hasattr(trainer, "_truncate_inputs"):
        return None
    if getattr(settings, "truncation_mode", "keep_start") != "keep_start":
        return None
    # KTO of 1.3.0 keeps 512 tokens if the config has no limit.
    limit: int | None = getattr(trainer, "max_length", settings.max_length)
    return limit


_LIMIT = 4
_BATCH = 3
_ROWS = (
    ("a b", "c d e", "f"),
    ("a b c d", "e", "f g"),
    ("b c d", "e f", "g"),
    ("c", "d", "e f g h"),
    ("a b c d e", "f", "g"),
    ("d e", "f g h", "a"),
    ("f g h a b c d", "e", "f"),
    ("h g", "f", "e d"),
)
"""Prompts, chosen and rejected answers. Of three the prompt has ``_LIMIT`` words or more."""

Row = dict[str, Any]


def prompts_leave_room(module: ModuleType) -> Outcome:
    """Weigh the tokens of rows by their place, of a dataset to train on and of two to evaluate, and then compare them.

    Right are those of the rows whose prompt is shorter than the limit, wrong those of all rows.
    """
    method = "DPO" if "dpo" in module.__name__ else "KTO"
    trainer_class = getattr(module, f"{method}Trainer")
    if not hasattr(module, f"{method}Config") or not hasattr(trainer_class, "_prepare_dataset"):
        return absent(f"the {method}Trainer of this module stands elsewhere, or cuts prompts at max_prompt_length")
    if hasattr(trainer_class, "tokenize_row"):
        return absent("prompts are cut at max_prompt_length")
    with single_process(module):
        trainer = _constructed(module, method, evaluation={"same": _rows(method), "others": _rows(method)[2:6]})
        datasets = [trainer.train_dataset, *trainer.eval_dataset.values()]
        found = [list(dataset) for dataset in datasets]
        given = [_rows(method), _rows(method), _rows(method)[2:6]]
        right, wrong = ([_tokenised(rows, limit) for rows in given] for limit in (_LIMIT, None))
        outcome = judge(_weighted(found), right=_weighted(right), wrong=_weighted(wrong))
        if _token_ids(found) != (right if outcome.verdict is Verdict.FIXED else wrong):
            raise AssertionError(f"the rows are {found}")
        code = inspect.unwrap(trainer_class._prepare_dataset).__code__
        drops_itself = "Dropping fully truncated examples from " in code.co_consts
        if outcome.verdict is Verdict.FIXED and not drops_itself and (mistakes := list(_mistakes(module, method))):
            raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes(module: ModuleType, method: str) -> Iterator[str]:
    """Say which rows are wrong: those of other settings, of a stream, or of a dataset with nothing to drop or keep."""
    rows = _rows(method)
    long, short = (
        [row for row in rows if (len(row["prompt"].split()) >= _LIMIT) is is_long] for is_long in (True, False)
    )
    trainer = _constructed(module, method, evaluation={"short": short, "long": long, "stream": stream(rows)})
    for name, given in {"short": short, "long": long, "stream": rows}.items():
        yield from _difference(name, trainer.eval_dataset[name], _tokenised(given, _LIMIT))
    very_long = [{**rows[0], "prompt": " ".join(600 * "a")}, *rows[1:]]
    keep_end = {"truncation_mode": "keep_end"} if method == "DPO" else {"max_length": 8}
    cases: dict[str, tuple[Callable[[Any], int | None], list[Row], dict[str, Any]]] = {
        # KTO of 1.3.0 has a limit anyway.
        "no limit": (lambda trainer: vars(trainer).get("max_length"), very_long, {"max_length": None}),
        "another end": (lambda trainer: None, rows, keep_end),
        "a collator of the user's": (_cut_by_the_trainer, rows, {"data_collator": list}),
    }
    for name, (limit, given, settings) in cases.items():
        trainer = _constructed(module, method, rows=given, **settings)
        yield from _difference(name, trainer.train_dataset, _tokenised(given, limit(trainer)))


def _cut_by_the_trainer(trainer: Any) -> int | None:
    return _LIMIT if hasattr(trainer, "_truncate_inputs") else None


def _difference(name: str, dataset: Any, expected: list[Row]) -> Iterator[str]:
    (found,) = _token_ids([list(dataset)])
    if found != expected:
        yield f"{name}: prepared are {found}, and not {expected}"


def _rows(method: str) -> list[Row]:
    if method == "DPO":
        return [{"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {other}"} for prompt, chosen, other in _ROWS]
    return [
        {"prompt": prompt, "completion": f" {chosen}", "label": index % 2 == 0}
        for index, (prompt, chosen, _) in enumerate(_ROWS)
    ]


def _tokenised(rows: list[Row], limit: int | None) -> list[Row]:
    """Return the token ids of the rows whose prompt is shorter than ``limit``, or of all."""
    kept = [
        {f"{name}_ids": _ids(row[name], ends=name != "prompt") for name in row if name != "label"}
        for row in rows
        if limit is None or len(row["prompt"].split()) < limit
    ]
    for begin in range(0, len(kept), _BATCH):
        batch = kept[begin : begin + _BATCH]
        for row, before in zip(batch, [batch[-1], *batch[:-1]], strict=True):
            if "completion_ids" in row:
                row["KL_completion_ids"] = before["completion_ids"]
    return kept


def _ids(text: str, *, ends: bool) -> list[int]:
    return [_WORDS[word] for word in text.split()] + [_WORDS["<eos>"]] * ends


_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")


def _token_ids(datasets: list[list[Row]]) -> list[list[Row]]:
    return [[{name: row[name] for name in _COLUMNS if name in row} for row in rows] for rows in datasets]


def _weighted(datasets: list[list[Row]]) -> float:
    tokens = [token for rows in _token_ids(datasets) for row in rows for name in sorted(row) for token in row[name]]
    return float(sum(place * token for place, token in enumerate(tokens, 1)))


def _constructed(
    module: ModuleType,
    method: str,
    *,
    rows: Any = None,
    evaluation: dict[str, Any] | None = None,
    data_collator: Any = None,
    **settings: Any,
) -> Any:
    """Return a trainer that has prepared its datasets. ``rows`` are those to train on."""
    trainer_class = getattr(module, f"{method}Trainer")
    usual = {"max_length": _LIMIT, "n_gpu": 1, "process_index": 0, "per_device_train_batch_size": _BATCH}
    evaluation = {
        name: _in_memory(split) if isinstance(split, list) else split for name, split in (evaluation or {}).items()
    }
    return constructed(
        # TRL reports each of its trainers to the hub.
        type(trainer_class.__name__, (trainer_class,), {"_send_telemetry": lambda self: None}),
        model=tiny_attention_model(),
        ref_model=tiny_attention_model(),
        args=default_arguments(getattr(module, f"{method}Config"), **{**usual, **settings}),
        data_collator=data_collator,
        train_dataset=_in_memory(_rows(method) if rows is None else rows),
        eval_dataset=evaluation or None,
        processing_class=_tokenizer(),
    )


_WORDS = {word: index for index, word in enumerate(("<pad>", "<eos>", *"abcdefgh"))}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_WORDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _in_memory(rows: list[Row]) -> Any:
    """Return a dataset that is mapped and filtered without a hash, a cache or a progress bar."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    class InMemory(Dataset):  # type: ignore[misc]
        def map(
            self,
            function: Callable[..., Any],
            fn_kwargs: Mapping[str, Any] = MappingProxyType({}),
            batched: bool = False,
            batch_size: int = 1,
            remove_columns: Sequence[str] = (),
            **options: Any,
        ) -> Any:
            mapped, rows = [], list(self)
            for begin in range(0, len(rows), batch_size):
                batch = rows[begin : begin + batch_size]
                if batched:
                    columns = {name: [row[name] for row in batch] for name in batch[0]}
                    columns |= function({**columns}, **fn_kwargs)
                    mapped += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                else:
                    mapped += [row | function({**row}, **fn_kwargs) for row in batch]
            return _in_memory([{name: row[name] for name in row if name not in remove_columns} for row in mapped])

        def filter(self, function: Callable[..., Any], **options: Any) -> Any:
            return _in_memory([row for row in self if function(row)])

    return InMemory(InMemoryTable.from_pylist(rows), fingerprint="in memory")
