"""SFT cuts rows that are longer than ``max_length``, 1024 by default, and one log line says what is lost.

TRL's own documentation has the cut, so nothing is changed. Where TRL cuts depends on the release:

- 0.16.0 to 1.0.0rc1: ``truncate_dataset``, while the dataset is prepared.
- 1.0.0 to 1.7.1: the collator that the trainer makes, batch by batch. The prepared dataset still has whole rows.
- From 1.8.0 on: ``_prepare_dataset`` itself, right after it has asked for the columns of the tokenised dataset. From
  1.9.0 on it also drops the rows that have no label left.
- With packing: ``pack_dataset``, whose strategies ``ffd`` (0.19) and ``bfd`` (the default from 0.20.0 on) keep the
  first ``max_length`` tokens of each row. ``wrapped`` and ``bfd_split`` lose nothing, nor does packing up to 0.18.2.

So the functions that ``_prepare_dataset`` calls note the dataset that it is about to cut, and ``_prepare_dataset`` says
what became of it, because it knows the tokenizer and the name of the dataset. Up to 0.15 the tokenizer, or a function
without a name, cuts, and nothing shows the whole rows.

The main process counts. It reads the lengths of all rows, and the tokens of those that are cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import act, argument, judge, module_of
from ...by_identity import ByIdentity
from ...model import Outcome
from ...testing import (
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
    stream,
    stub_trainer,
    tiny_attention_model,
    tiny_tokenizer,
)

_ROWS_AT_ONCE = 1000

_log = logging.getLogger("trl_hotfix")
_said: ByIdentity[set[str]] = ByIdentity()
"""What was said of each trainer: every evaluation with a dataset of its own prepares it again."""


@dataclass
class _Preparation:
    """A call of ``_prepare_dataset``. ``whole`` is the dataset before it is cut; None if it is not cut."""

    whole: Any = None


_preparations: dict[int, _Preparation] = {}
"""The call that each thread is in. Functions that read a ``ContextVar`` cannot be pickled."""


def say_what_is_lost(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prepare a dataset, and say what was cut off its rows."""
    settings, name, packing, tokenizer = (
        argument(wrapped, args, kwargs, parameter)
        for parameter in ("args", "dataset_name", "packing", "processing_class")
    )
    preparation = _preparations[get_ident()] = _Preparation()
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _preparations.pop(get_ident(), None)
    if packing or not _collator_cuts(module_of(wrapped)):
        keeps_the_end = not packing and getattr(settings, "truncation_mode", None) == "keep_end"
        _say(instance, settings, name, preparation.whole, settings.max_length, keeps_the_end, tokenizer)
    return result


def note_what_is_truncated(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note the dataset that ``truncate_dataset`` is given."""
    _note(argument(wrapped, args, kwargs, "dataset"))
    return wrapped(*args, **kwargs)


def note_what_is_packed(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note the dataset that ``pack_dataset`` is given, or that nothing is cut, as the strategy has it."""
    cuts = argument(wrapped, args, kwargs, "strategy") in ("ffd", "bfd")
    _note(argument(wrapped, args, kwargs, "dataset") if cuts else None)
    return wrapped(*args, **kwargs)


def note_what_is_tokenised(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note the first dataset that has tokens. Without packing it is cut next."""
    names = wrapped(*args, **kwargs)
    preparation = _preparations.get(get_ident())
    if preparation is not None and preparation.whole is None and "input_ids" in names:
        _note(argument(wrapped, args, kwargs, "dataset"))
    return names


def _note(whole: Any) -> None:
    preparation = _preparations.get(get_ident())
    if preparation is not None:
        preparation.whole = whole


def _collator_cuts(module: ModuleType) -> bool:
    """Return whether the collator of this release cuts, and preparation does not."""
    return "truncation_mode" in module.DataCollatorForLanguageModeling.__dataclass_fields__


def say_what_the_collator_cuts(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and say what its collator will cut off the rows of its datasets."""
    wrapped(*args, **kwargs)
    collator, evaluation = instance.data_collator, instance.eval_dataset
    if not isinstance(collator, module_of(wrapped).DataCollatorForLanguageModeling) or collator.padding_free:
        return
    keeps_the_end = collator.truncation_mode == "keep_end"
    datasets = {"train": instance.train_dataset}
    datasets |= evaluation if isinstance(evaluation, dict) else {"eval": evaluation}
    for name, dataset in datasets.items():
        tokenizer = instance.processing_class
        _say(instance, instance.args, name, dataset, collator.max_length, keeps_the_end, tokenizer)


def _say(
    trainer: Any,
    settings: Any,
    name: str,
    dataset: Any,
    max_length: int | None,
    keeps_the_end: bool,
    tokenizer: Any,
) -> None:
    """Say once, on the main process, what a dataset of whole rows loses if ``max_length`` tokens of each are kept."""
    from datasets import Dataset

    # The stand-ins of other self-tests have no rank, and nothing is said of them.
    if max_length is None or getattr(settings, "process_index", None) != 0:
        return
    # A stream cannot be counted, and a transform may make the tokens of each batch.
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    # A processor has a tokenizer inside.
    end = getattr(tokenizer, "tokenizer", tokenizer).eos_token_id
    rows, lost, tokens, longest, ends = _lost(dataset, max_length, keeps_the_end, end)
    if not rows:
        return
    message = (
        f"SFT: max_length={max_length} cuts {rows} of the {len(dataset)} rows of the {name} dataset, the longest of "
        f"which has {longest} tokens. {lost} of {tokens} tokens are lost ({lost / tokens:.1%}), {ends} of them ends of "
        "sequence. Raise max_length, or split the longer rows"
    )
    said = _said.get(trainer) or set()
    if message not in said:
        _said[trainer] = said | {message}
        act()
        _log.warning("%s", message)


def _lost(dataset: Any, max_length: int, keeps_the_end: bool, end: Any) -> tuple[int, ...]:
    """Count the rows that are cut, the tokens that are lost, all tokens, those of the longest row, and lost ends."""
    import numpy

    rows = lost = tokens = longest = ends = 0
    for table in dataset.with_format("arrow", columns=["input_ids"]).iter(batch_size=_ROWS_AT_ONCE):
        ids = table["input_ids"].combine_chunks()
        lengths = numpy.asarray(ids.value_lengths())
        tokens += int(lengths.sum())
        longest = max(longest, int(lengths.max()))
        is_cut = lengths > max_length
        cut, lengths = numpy.asarray(ids.filter(is_cut).flatten()), lengths[is_cut]
        place = numpy.arange(len(cut)) - numpy.repeat(lengths.cumsum() - lengths, lengths)
        is_lost = place < numpy.repeat(lengths - max_length, lengths) if keeps_the_end else place >= max_length
        rows, lost, ends = rows + len(lengths), lost + int(is_lost.sum()), ends + int((cut[is_lost] == end).sum())
    return rows, lost, tokens, longest, ends


_TRAIN = [[5, 6, 0], [5, 6, 7, 8, 0], [5, 0, 6, 7, 8, 0, 9], [5, 6, 7, 8]]
_EVALUATION = [[5, 0, 6, 7, 8, 9, 0], [5, 0]]
_TEXTS = ["a b c d e <pad>", "a <pad>"]
"""A row for each dataset that is longer than four tokens. The end of sequence is token 0, and so is every word."""


def every_loss_is_said(module: ModuleType) -> Outcome:
    """Count the trainers of which exactly what their datasets lose is said, and nothing where they lose nothing."""
    model, cases, wrong = tiny_attention_model(), _cases(module), {}
    for name, (settings, expected) in cases.items():
        with recorded_warnings() as lines:
            _prepare(module, model, **settings)
        if lines != [_line(*loss) for loss in expected]:
            wrong[name] = lines
    losing = [name for name, (_, expected) in cases.items() if expected]
    if wrong and wrong != {name: [] for name in losing}:
        raise AssertionError(f"it was said: {wrong}")
    _call_the_functions_outside(module)
    return judge(len(cases) - len(wrong), right=len(cases), wrong=len(cases) - len(losing))


_Loss = tuple[str, str, int, str, str, int]
_OF_TRAIN: _Loss = ("train", "2 of the 4", 7, "4 of 19", "21.1%", 2)
_OF_EVALUATION: _Loss = ("eval", "1 of the 2", 7, "3 of 9", "33.3%", 1)


def _line(name: str, rows: str, longest: int, tokens: str, share: str, ends: int) -> str:
    return (
        f"SFT: max_length=4 cuts {rows} rows of the {name} dataset, the longest of which has {longest} tokens. "
        f"{tokens} tokens are lost ({share}), {ends} of them ends of sequence. Raise max_length, or split the longer "
        "rows"
    )


def _cases(module: ModuleType) -> dict[str, tuple[dict[str, Any], list[_Loss]]]:
    """Return the settings of trainers, and what their datasets lose."""
    fields = module.SFTConfig.__dataclass_fields__
    packs_by_sequence = "packing_strategy" in fields  # up to 0.18 packing loses nothing
    collator_cuts = _collator_cuts(module)
    keep_end = {"truncation_mode": "keep_end"} if "truncation_mode" in fields else {}
    texts = _in_memory([{"text": text} for text in _TEXTS])
    evaluations = {
        "one": _rows(_EVALUATION),
        "whole": _rows([[5, 6, 7, 0], [5, 0]]),
        "texts": texts,
        "stream": stream([{"input_ids": ids} for ids in _TRAIN]),
    }
    of_evaluations = [("one", *_OF_EVALUATION[1:]), ("texts", "1 of the 2", 6, "2 of 8", "25.0%", 2)]
    of_train = (*_OF_TRAIN[:5], 1) if keep_end else _OF_TRAIN
    cases: dict[str, tuple[dict[str, Any], list[_Loss]]] = {
        "the start is kept": ({"evaluation": evaluations, "twice": True}, [_OF_TRAIN, *of_evaluations]),
        "the end is kept": ({"evaluation": _rows(_EVALUATION), **keep_end}, [of_train, _OF_EVALUATION]),
        "packing": ({"packing": True, **keep_end}, [_OF_TRAIN] if packs_by_sequence else []),
        "packing a stream of tokens": ({"packing": True, "packing_strategy": "wrapped"}, []),
        "no limit": ({"max_length": None}, []),
        "another rank": ({"process_index": 1}, []),
        "a collator of the user's": ({"data_collator": list}, [] if collator_cuts else [_OF_TRAIN]),
    }
    if collator_cuts:
        cases["a transform of the user's"] = ({"train": texts, "dataset_kwargs": {"skip_prepare_dataset": True}}, [])
        flat = module.DataCollatorForLanguageModeling(pad_token_id=0, max_length=4, padding_free=True)
        cases["a collator that cuts nothing"] = ({"data_collator": flat}, [])
    else:
        cases["Liger"] = ({"use_liger_kernel": True}, [_OF_TRAIN])
    return cases


def _rows(rows: list[list[int]]) -> Any:
    return _in_memory([{"input_ids": ids} for ids in rows])


def _prepare(
    module: ModuleType,
    model: Any,
    *,
    train: Any = None,
    evaluation: Any = None,
    data_collator: Any = None,
    twice: bool = False,
    **settings: Any,
) -> None:
    """Prepare the datasets as the constructor does, and that for training ``twice``, as an evaluation would."""
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    train = _rows(_TRAIN) if train is None else train
    usual: dict[str, Any] = {"max_length": 4, "process_index": 0, "dataset_text_field": "text", "loss_type": "nll"}
    usual |= {"n_gpu": 1, "accelerator_config": SimpleNamespace(dispatch_batches=False)}
    arguments = default_arguments(module.SFTConfig, **{**usual, **settings})
    evaluations = evaluation if isinstance(evaluation, dict) else {"eval": evaluation}
    datasets = [("train", train), *evaluations.items(), *([("train", train)] if twice else [])]
    with single_process(module):
        if _collator_cuts(module):
            trainer = constructed(
                # TRL reports each of its trainers to the hub.
                type("SFTTrainer", (module.SFTTrainer,), {"_send_telemetry": lambda self: None}),
                model=model,
                args=arguments,
                data_collator=data_collator,
                train_dataset=train,
                eval_dataset=evaluation,
                processing_class=tokenizer,
            )
            datasets = datasets[-1:] if twice else []
        else:
            parts = {"completion_only_loss": False, "_is_vlm": False, "_tokenizer": tokenizer, "chat_template": None}
            trainer = stub_trainer(module.SFTTrainer, arguments, **parts)
        for name, dataset in datasets:
            if dataset is not None:
                trainer._prepare_dataset(dataset, tokenizer, arguments, arguments.packing, None, name)


def _call_the_functions_outside(module: ModuleType) -> None:
    """Call what notes datasets where none is prepared, and a preparation that fails; nothing may be kept of either."""
    with suppress(ValueError):
        # Packing needs a limit.
        _prepare(module, tiny_attention_model(), max_length=None, packing=True)
    for name, arguments in {"get_dataset_column_names": (), "truncate_dataset": (4,), "pack_dataset": (4,)}.items():
        if hasattr(module, name):
            getattr(module, name)(_rows(_TRAIN), *arguments)
    if get_ident() in _preparations:
        raise AssertionError("a dataset is kept although none is prepared")


def _in_memory(rows: list[dict[str, Any]]) -> Any:
    """Return a dataset that is mapped without a hash, a cache or a progress bar."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    class InMemory(Dataset):  # type: ignore[misc]
        def map(self, function: Callable[..., Any], fn_kwargs: Any = None, **kwargs: Any) -> Any:
            if self.format["type"] == "arrow":
                return _in_memory(function(self[:], **(fn_kwargs or {})).to_pylist())
            removed = kwargs.get("remove_columns") or ()
            mapped = [{**row, **function(row, **(fn_kwargs or {}))} for row in self]
            return _in_memory([{name: row[name] for name in row if name not in removed} for row in mapped])

        def filter(self, function: Callable[..., Any], **kwargs: Any) -> Any:
            return _in_memory([row for row in self if function(row)])

    return InMemory(InMemoryTable.from_pylist(rows), fingerprint="in memory")
