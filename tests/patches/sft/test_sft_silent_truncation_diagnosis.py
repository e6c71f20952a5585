"""One line says what each dataset loses, in training and in evaluation, and TRL prepares it as it did."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, concatenate_datasets
from trl.trainer import sft_trainer

from trl_hotfix.testing import (
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
    stream,
    stub_trainer,
    tiny_attention_model,
    tiny_tokenizer,
)

import tiny

ID, PREPARE = "sft-silent-truncation-diagnosis", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"
CONSTRUCT = "trl.trainer.sft_trainer:SFTTrainer.__init__"

FIELDS = sft_trainer.SFTConfig.__dataclass_fields__
COLLATOR_CUTS = "truncation_mode" in sft_trainer.DataCollatorForLanguageModeling.__dataclass_fields__
"""Whether the collator cuts the rows (1.0.0 to 1.7.1), and not the preparation of the dataset."""
PACKS_BY_SEQUENCE = "packing_strategy" in FIELDS
"""Whether packing can cut rows: it loses nothing before 0.19."""

# A row of each dataset is longer than four tokens. The end of sequence is token 0, and so is every word of a text.
TRAIN = [[5, 6, 0], [5, 6, 7, 8, 0], [5, 0, 6, 7, 8, 0, 9], [5, 6, 7, 8]]
EVALUATION = [[5, 0, 6, 7, 8, 9, 0], [5, 0]]
TEXTS = ["a b c d e <pad>", "a <pad>"]


def line(name: str, rows: str, longest: int, tokens: str, share: str, ends: int) -> str:
    return (
        f"SFT: max_length=4 cuts {rows} rows of the {name} dataset, the longest of which has {longest} tokens. "
        f"{tokens} tokens are lost ({share}), {ends} of them ends of sequence. Raise max_length, or split the longer "
        "rows"
    )


OF_TRAIN = line("train", "2 of the 4", 7, "4 of 19", "21.1%", 2)
OF_TRAIN_AT_THE_START = line("train", "2 of the 4", 7, "4 of 19", "21.1%", 1)


def of_evaluation(name: str = "eval") -> str:
    return line(name, "1 of the 2", 7, "3 of 9", "33.3%", 1)


def of_texts(name: str) -> str:
    return line(name, "1 of the 2", 6, "2 of 8", "25.0%", 2)


def rows(ids: list[list[int]]) -> Any:
    return Dataset.from_list([{"input_ids": row} for row in ids])


def texts() -> Any:
    return Dataset.from_list([{"text": text} for text in TEXTS])


def words() -> Any:
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


class Prepared:
    """A trainer that has prepared its datasets as its constructor does, and the lines of the log.

    ``settings`` are arguments of the config.
    """

    def __init__(
        self,
        *,
        train: Any = None,
        evaluation: Any = None,
        data_collator: Any = None,
        processing_class: Any = None,
        **settings: Any,
    ) -> None:
        self.tokenizer = words() if processing_class is None else processing_class
        train = rows(TRAIN) if train is None else train
        usual: dict[str, Any] = {"max_length": 4, "process_index": 0, "dataset_text_field": "text", "loss_type": "nll"}
        usual |= {"n_gpu": 1, "accelerator_config": SimpleNamespace(dispatch_batches=False)}
        self.args = default_arguments(sft_trainer.SFTConfig, **{**usual, **settings})
        evaluations = evaluation if isinstance(evaluation, dict) else {"eval": evaluation}
        self.datasets: dict[str, Any] = {}
        self.lines: list[str] = []
        with single_process(sft_trainer), recorded_warnings() as said:
            if COLLATOR_CUTS:
                self.trainer = constructed(
                    # TRL reports each of its trainers to the hub.
                    type("SFTTrainer", (sft_trainer.SFTTrainer,), {"_send_telemetry": lambda self: None}),
                    model=tiny_attention_model(),
                    args=self.args,
                    data_collator=data_collator,
                    train_dataset=train,
                    eval_dataset=evaluation,
                    processing_class=self.tokenizer,
                )
        self.lines += said
        if not COLLATOR_CUTS:
            parts = {"completion_only_loss": False, "_is_vlm": False, "_tokenizer": self.tokenizer}
            self.trainer = stub_trainer(sft_trainer.SFTTrainer, self.args, **parts, chat_template=None)
            for name, dataset in {"train": train, **evaluations}.items():
                if dataset is not None:
                    self.datasets[name] = self.prepare(dataset, name)

    def prepare(self, dataset: Any, name: str) -> Any:
        """Prepare a dataset, as an evaluation with a dataset of its own does."""
        packing = self.args.packing
        with single_process(sft_trainer), recorded_warnings() as said:
            prepared = self.trainer._prepare_dataset(dataset, self.tokenizer, self.args, packing, None, name)
        self.lines += said
        return prepared

    @property
    def acts(self) -> tuple[int | None, int | None]:
        return tiny.acts(ID, CONSTRUCT, self.trainer), tiny.acts(ID, PREPARE, self.trainer)


def test_the_log_has_one_line_for_each_dataset_that_loses_tokens() -> None:
    evaluations = {
        "one": rows(EVALUATION),
        "whole": rows([[5, 6, 7, 0], [5, 0]]),
        "texts": texts(),
        "stream": stream([{"input_ids": ids} for ids in TRAIN]),
    }
    prepared = Prepared(evaluation=evaluations)
    expected = [OF_TRAIN, of_evaluation("one"), of_texts("texts")]
    assert prepared.lines == expected
    prepared.prepare(rows(TRAIN), "train")
    assert prepared.lines == expected


def test_a_single_evaluation_dataset_has_its_line() -> None:
    assert Prepared(evaluation=rows(EVALUATION)).lines == [OF_TRAIN, of_evaluation()]


def test_trl_logs_nothing(switch: Any) -> None:
    with switch.off():
        assert Prepared(evaluation=rows(EVALUATION)).lines == []


def test_each_trainer_has_its_own_line() -> None:
    assert [Prepared().lines for _ in range(2)] == [[OF_TRAIN]] * 2


def test_the_same_trainer_logs_another_loss_too() -> None:
    if COLLATOR_CUTS:
        pytest.skip("this release logs nothing about a dataset that is prepared later")
    prepared = Prepared()
    prepared.prepare(rows(EVALUATION), "eval")
    prepared.prepare(rows(EVALUATION), "eval")
    prepared.prepare(rows(EVALUATION), "other")
    assert prepared.lines == [OF_TRAIN, of_evaluation(), of_evaluation("other")]


def test_the_start_is_lost_if_the_end_is_kept() -> None:
    if "truncation_mode" not in FIELDS:
        pytest.skip("this release keeps the start")
    prepared = Prepared(evaluation=rows(EVALUATION), truncation_mode="keep_end")
    assert prepared.lines == [OF_TRAIN_AT_THE_START, of_evaluation()]


def test_packing_by_sequence_loses_the_ends() -> None:
    keep_end = {"truncation_mode": "keep_end"} if "truncation_mode" in FIELDS else {}
    assert Prepared(packing=True, **keep_end).lines == ([OF_TRAIN] if PACKS_BY_SEQUENCE else [])


@pytest.mark.parametrize("strategy", ["wrapped", "bfd_split"])
def test_a_strategy_that_splits_rows_loses_nothing(strategy: str) -> None:
    try:
        prepared = Prepared(packing=True, packing_strategy=strategy)
    except ValueError as error:
        if "strategy" not in str(error):
            raise
        pytest.skip("this release has no such strategy")
    assert prepared.lines == []


@pytest.mark.parametrize(
    "settings",
    [{"max_length": None}, {"process_index": 1}, {"process_index": None}, {"max_length": 7}],
    ids=["no limit", "another rank", "no rank", "a limit that no row is beyond"],
)
def test_the_log_has_no_line_where_no_token_is_lost_or_another_rank_logs_it(settings: dict[str, Any]) -> None:
    prepared = Prepared(**settings)
    assert prepared.lines == []
    assert not any(prepared.acts)


def test_a_line_is_an_act() -> None:
    prepared = Prepared()
    assert prepared.acts == ((1, 0) if COLLATOR_CUTS else (None, 1))


def test_a_collator_of_the_users_does_not_cut() -> None:
    assert Prepared(data_collator=list).lines == ([] if COLLATOR_CUTS else [OF_TRAIN])


def test_rows_that_a_transform_tokenizes_are_not_counted() -> None:
    if not COLLATOR_CUTS:
        pytest.skip("in this release a dataset that is not prepared is not cut")
    assert Prepared(train=texts(), dataset_kwargs={"skip_prepare_dataset": True}).lines == []


def test_a_dataset_that_is_not_prepared_is_counted_where_the_collator_cuts() -> None:
    if not COLLATOR_CUTS:
        pytest.skip("in this release a dataset that is not prepared is not cut")
    assert Prepared(dataset_kwargs={"skip_prepare_dataset": True}).lines == [OF_TRAIN]


def test_a_collator_without_padding_cuts_nothing() -> None:
    if not COLLATOR_CUTS:
        pytest.skip("in this release the collator cuts nothing")
    flat = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, max_length=4, padding_free=True)
    assert Prepared(data_collator=flat).lines == []


def test_a_collator_that_is_passed_has_its_own_limit() -> None:
    if not COLLATOR_CUTS:
        pytest.skip("in this release the collator cuts nothing")
    collator = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, max_length=4, truncation_mode="keep_end")
    assert Prepared(data_collator=collator, max_length=None).lines == [OF_TRAIN_AT_THE_START]


def test_liger_changes_nothing() -> None:
    if COLLATOR_CUTS:
        pytest.skip("the constructor asks for Liger, which is not installed")
    assert Prepared(use_liger_kernel=True).lines == [OF_TRAIN]


def test_the_end_of_sequence_is_that_of_the_tokenizer_of_a_processor() -> None:
    if COLLATOR_CUTS:
        pytest.skip("the constructor takes no such processor")
    assert Prepared(processing_class=SimpleNamespace(tokenizer=words(), eos_token_id=5)).lines == [OF_TRAIN]


def test_all_rows_of_a_long_dataset_of_several_parts_are_counted() -> None:
    parts = [rows([TRAIN[2], *[[5, 6, 7]] * 1500]), rows([*[[5, 6, 0]] * 700, EVALUATION[0], [5, 6, 7, 8, 0]])]
    (said,) = Prepared(train=concatenate_datasets(parts)).lines
    assert said == line("train", "3 of the 2203", 7, "7 of 6619", "0.1%", 3)


@pytest.mark.parametrize("packing", [False, True])
def test_the_dataset_is_prepared_as_by_trl(packing: bool, switch: Any) -> None:
    if COLLATOR_CUTS:
        pytest.skip("the constructor changes no dataset in this release")
    evaluations = {"tokens": rows(EVALUATION), "texts": texts()}
    patched = Prepared(evaluation=evaluations, packing=packing).datasets
    with switch.off():
        unpatched = Prepared(evaluation=evaluations, packing=packing).datasets
    assert {name: list(dataset) for name, dataset in patched.items()} == {
        name: list(dataset) for name, dataset in unpatched.items()
    }


def gone(dataset: weakref.ref[Any]) -> bool:
    gc.collect()
    return dataset() is None


def test_no_dataset_is_kept_when_it_is_prepared() -> None:
    dataset = rows(TRAIN)
    kept, prepared = weakref.ref(dataset), Prepared()
    result = prepared.prepare(dataset, "train")
    del dataset, result
    assert gone(kept)


def test_no_dataset_is_kept_of_a_preparation_that_fails() -> None:
    dataset = rows(TRAIN)
    kept = weakref.ref(dataset)
    # Packing needs a limit.
    with pytest.raises(ValueError, match="max_length"):
        Prepared(train=dataset, max_length=None, packing=True)
    del dataset
    assert gone(kept)


@pytest.mark.parametrize(
    ("name", "arguments"), [("get_dataset_column_names", ()), ("truncate_dataset", (4,)), ("pack_dataset", (4,))]
)
def test_no_dataset_is_kept_of_a_function_that_is_called_alone(name: str, arguments: tuple[Any, ...]) -> None:
    if not hasattr(sft_trainer, name):
        pytest.skip("this release has no such function")
    # Not during a preparation that has failed either.
    with suppress(ValueError):
        Prepared(max_length=None, packing=True)
    dataset = rows(TRAIN)
    kept = weakref.ref(dataset)
    result = getattr(sft_trainer, name)(dataset, *arguments)
    del dataset, result
    assert gone(kept)
