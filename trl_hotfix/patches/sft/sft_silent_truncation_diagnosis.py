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
import re
from dataclasses import dataclass
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, module_of, wrapper
from ...by_identity import ByIdentity
from ...model import Outcome
from ...testing import (
    constructed,
    default_arguments,
    quick_is_peft_model,
    recorded_warnings,
    single_process,
    stub_trainer,
    tiny_causal_lm,
    tiny_tokenizer,
)

_ROWS_AT_ONCE = 1000

_log = logging.getLogger("trl_hotfix")
_said: ByIdentity[set[str]] = ByIdentity()
"""The warnings that each trainer has had: every evaluation with a dataset of its own prepares it again."""


@dataclass
class _Preparation:
    """A call of ``_prepare_dataset``. ``whole`` is the dataset before it is cut; None if it is not cut."""

    whole: Any = None


_preparations: dict[int, _Preparation] = {}
"""The call that each thread is in. Functions that read a ``ContextVar`` cannot be pickled."""


@wrapper
def say_what_is_lost(call: Call) -> Any:
    """Prepare a dataset, and say what was cut off its rows."""
    names = ("args", "dataset_name", "packing", "processing_class")
    settings, name, packing, tokenizer = (call[parameter] for parameter in names)
    preparation = _preparations[get_ident()] = _Preparation()
    try:
        result = call()
    finally:
        _preparations.pop(get_ident(), None)
    if packing or not _collator_cuts(module_of(call)):
        keeps_the_end = not packing and getattr(settings, "truncation_mode", None) == "keep_end"
        _say(call, settings, name, preparation.whole, settings.max_length, keeps_the_end, tokenizer)
    return result


@wrapper
def note_what_is_truncated(call: Call) -> Any:
    """Note the dataset that ``truncate_dataset`` is given."""
    _note(call["dataset"])
    return call()


@wrapper
def note_what_is_packed(call: Call) -> Any:
    """Note the dataset that ``pack_dataset`` is given, or that nothing is cut, as the strategy has it."""
    _note(call["dataset"] if call["strategy"] in ("ffd", "bfd") else None)
    return call()


@wrapper
def note_what_is_tokenised(call: Call) -> Any:
    """Note the first dataset that has tokens. Without packing it is cut next."""
    names = call()
    preparation = _preparations.get(get_ident())
    if preparation is not None and preparation.whole is None and "input_ids" in names:
        _note(call["dataset"])
    return names


def _note(whole: Any) -> None:
    preparation = _preparations.get(get_ident())
    if preparation is not None:
        preparation.whole = whole


def _collator_cuts(module: ModuleType) -> bool:
    """Return whether the collator of this release cuts, and preparation does not."""
    return "truncation_mode" in module.DataCollatorForLanguageModeling.__dataclass_fields__


@wrapper
def say_what_the_collator_cuts(call: Call) -> None:
    """Make the trainer, and say what its collator will cut off the rows of its datasets."""
    call()
    trainer = call.trainer
    collator, evaluation = trainer.data_collator, trainer.eval_dataset
    if not isinstance(collator, module_of(call).DataCollatorForLanguageModeling) or collator.padding_free:
        return
    keeps_the_end = collator.truncation_mode == "keep_end"
    datasets = {"train": trainer.train_dataset}
    datasets |= evaluation if isinstance(evaluation, dict) else {"eval": evaluation}
    for name, dataset in datasets.items():
        _say(call, trainer.args, name, dataset, collator.max_length, keeps_the_end, trainer.processing_class)


def _say(
    call: Call,
    settings: Any,
    name: str,
    dataset: Any,
    max_length: int | None,
    keeps_the_end: bool,
    tokenizer: Any,
) -> None:
    """Say once, on the main process, what a dataset of whole rows loses if ``max_length`` tokens of each are kept."""
    from datasets import Dataset

    # The stand-ins of other self-tests have no rank, and get no line.
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
    said = _said.get(call.trainer) or set()
    if message not in said:
        _said[call.trainer] = said | {message}
        call.act()
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


def every_loss_is_said(module: ModuleType) -> Outcome:
    """Read in the log how many tokens two rows, of three and of seven, lose if four of each are kept: three."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    class Rows(Dataset):  # type: ignore[misc]
        """It is not mapped, which would take hashes, a cache and progress bars."""

        def map(self, *args: Any, **kwargs: Any) -> Any:
            return self

        filter = map

    table = InMemoryTable.from_pylist([{"input_ids": [5, 6, 0]}, {"input_ids": [5, 6, 7, 8, 9, 4, 0]}])
    rows = Rows(table, fingerprint="two rows")
    args = default_arguments(module.SFTConfig, max_length=4, process_index=0, n_gpu=1, loss_type="nll")
    words = tiny_tokenizer()
    with single_process(module), quick_is_peft_model(module), recorded_warnings() as lines:
        if _collator_cuts(module):
            args.dataset_kwargs = {"skip_prepare_dataset": True}
            model = tiny_causal_lm(SimpleNamespace(_attn_implementation="sdpa", get_text_config=SimpleNamespace))
            model.add_model_tags = list
            # TRL reports each of its trainers to the hub.
            trainer_class = type("SFTTrainer", (module.SFTTrainer,), {"_send_telemetry": lambda self: None})
            constructed(trainer_class, model=model, args=args, train_dataset=rows, processing_class=words)
        else:
            parts = {"completion_only_loss": False, "_is_vlm": False, "_tokenizer": words, "chat_template": None}
            trainer = stub_trainer(module.SFTTrainer, args, **parts)
            trainer._prepare_dataset(rows, words, args, False, None, "train")
    lost = [int(tokens) for line in lines for tokens in re.findall(r"(\d+) of \d+ tokens are lost", line)]
    return judge(sum(lost), right=3, wrong=0)
