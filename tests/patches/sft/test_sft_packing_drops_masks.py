"""Packed rows have the mask of each of their tokens, and what has no mask is packed by TRL alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft.sft_packing_drops_masks import pack_the_masks
from trl_hotfix.testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer

import tiny

ID, TARGET = "sft-packing-drops-masks", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

FIELDS = sft_trainer.SFTConfig.__dataclass_fields__
HAS_ASSISTANTS = "assistant_only_loss" in FIELDS
STRATEGIES = ["ffd", "wrapped"] if "packing_strategy" in FIELDS else [None]

ROWS = [
    {"input_ids": [11, 12, 13], "completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]},
    {"input_ids": [21, 22], "completion_mask": [0, 1], "assistant_masks": [1, 0]},
    {"input_ids": [31, 32, 33, 34, 35, 36, 37], "completion_mask": [0, 1] * 3 + [0], "assistant_masks": [1] * 7},
]
PAIRS = [{"prompt": prompt, "completion": text} for prompt, text in (("ab", "cd"), ("e", "f"), ("ghij", ""))]


def trainer_with(**settings: Any) -> Any:
    defaults = {"max_length": 6, "max_seq_length": None, "use_liger_kernel": False}
    known = {name: value for name, value in {**defaults, **settings}.items() if name in FIELDS}
    args = default_arguments(sft_trainer.SFTConfig, **known)
    return stub_trainer(sft_trainer.SFTTrainer, args, completion_only_loss=args.completion_only_loss is not False)


def prepared(trainer: Any, dataset: Any, *, packing: bool = True) -> list[dict[str, Any]]:
    with single_process(sft_trainer):
        return list(trainer._prepare_dataset(dataset, CharacterTokenizer(), trainer.args, packing, None, "train"))


def tokens(rows: list[dict[str, Any]], mask: str) -> list[int]:
    """Return the tokens of all rows that are in the mask."""
    pairs = [pair for row in rows for pair in zip(row["input_ids"], row[mask], strict=True)]
    return sorted(token for token, is_in in pairs if is_in)


def of(kind: str) -> Any:
    return pytest.mark.skipif(kind == "assistant_masks" and not HAS_ASSISTANTS, reason="this release reads none")


@pytest.mark.parametrize("made", [Dataset.from_list, stream], ids=["dataset", "stream"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", [pytest.param(name, marks=of(name)) for name in list(ROWS[0])[1:]])
def test_each_packed_token_keeps_its_mask(mask: str, strategy: str | None, made: Any) -> None:
    rows = [{"input_ids": row["input_ids"], mask: row[mask], "text": "a"} for row in ROWS]
    trainer = trainer_with(packing_strategy=strategy)
    for _ in range(2):
        packed = prepared(trainer, made(rows))
        assert max(len(row["input_ids"]) for row in packed) == 6
        assert len(packed) < len(rows) or strategy == "wrapped" or strategy is None
        # First Fit Decreasing cuts what is longer than a packed row.
        cut = 6 if strategy == "ffd" else 7
        expected = [{name: row[name][:cut] for name in ("input_ids", mask)} for row in ROWS]
        assert tokens(packed, mask) == tokens(expected, mask)
        assert not {"text", "prompt"} & set(packed[0])
    assert trainer.args.max_length == 6
    assert tiny.acts(ID, TARGET, trainer) == 2


@pytest.mark.parametrize("settings", [{}, {"use_liger_kernel": True}, {"dataset_num_proc": 2}])
def test_only_completions_are_trained(settings: dict[str, Any]) -> None:
    trainer = trainer_with(packing_strategy=STRATEGIES[-1], completion_only_loss=True, **settings)
    packed = prepared(trainer, Dataset.from_list(PAIRS))
    trained = "".join(chr(token) for token in tokens(packed, "completion_mask"))
    assert trained == "\1\1\1cdf"
    assert trainer.args.use_liger_kernel is settings.get("use_liger_kernel", False)


def test_trl_packs_tokens_alone(switch: Any) -> None:
    with switch.off():
        packed = prepared(trainer_with(packing_strategy=STRATEGIES[-1]), Dataset.from_list(PAIRS))
    assert all("completion_mask" not in row for row in packed)


def test_packing_without_a_length_is_refused_as_before() -> None:
    with pytest.raises(ValueError, match="max_length"):
        prepared(trainer_with(max_length=None), Dataset.from_list(PAIRS))


def test_without_packing_trl_keeps_the_masks() -> None:
    trainer = trainer_with(completion_only_loss=True)
    assert all("completion_mask" in row for row in prepared(trainer, Dataset.from_list(PAIRS), packing=False))
    assert tiny.acts(ID, TARGET, trainer) == 0


class Prepare:
    """TRL's method: it notes the settings, and returns the dataset."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int | None]] = []

    def __call__(self, dataset: Any, args: Any, packing: bool) -> Any:
        self.calls.append((packing, args.max_length))
        return dataset


TEXT, PAIR = {"text": "a"}, {"prompt": "a", "completion": "b"}
TOKENS = {"input_ids": [1], "prompt": "a"}
COMPLETIONS, ANSWERS = {"input_ids": [1], "completion_mask": [1]}, {"input_ids": [1], "assistant_masks": [1]}
OF_COMPLETIONS, OF_ALL = (SimpleNamespace(completion_only_loss=value) for value in (True, False))
AS_THEY_ARE: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "no packing": (Dataset.from_list([PAIR]), OF_COMPLETIONS, {}, False),
    "no length": (Dataset.from_list([PAIR]), OF_COMPLETIONS, {"max_length": None}, True),
    "a list": ([COMPLETIONS], OF_COMPLETIONS, {}, True),
    "texts": (Dataset.from_list([TEXT]), OF_COMPLETIONS, {}, True),
    "all tokens": (Dataset.from_list([PAIR]), OF_ALL, {}, True),
    "all tokens of a mask": (Dataset.from_list([COMPLETIONS]), OF_ALL, {}, True),
    "tokens without a mask": (Dataset.from_list([TOKENS]), OF_COMPLETIONS, {"assistant_only_loss": True}, True),
    "no setting for assistants": (Dataset.from_list([ANSWERS]), OF_ALL, {}, True),
}


@pytest.mark.parametrize(("dataset", "trainer", "settings", "packing"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_a_dataset_without_a_mask_is_packed_by_trl_alone(
    dataset: Any, trainer: Any, settings: dict[str, Any], packing: bool
) -> None:
    prepare = Prepare()
    args = SimpleNamespace(**{"max_length": 6, **settings})
    assert pack_the_masks(Call(prepare, trainer, (dataset, args, packing))) is dataset
    assert prepare.calls == [(packing, args.max_length)]
