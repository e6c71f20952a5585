"""With Liger the same tokens are trained as without it, and what has no mask is prepared as TRL prepares it.

Preparing a dataset takes no Liger.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.sft.sft_liger_loss_masks_dropped import keep_assistant_masks, keep_masks
from trl_hotfix.testing import CharacterTokenizer, default_arguments, sft_prepared, single_process, stream, stub_trainer

import tiny

(PATCH,) = (patch for patch in loading.load() if patch.id == "sft-liger-loss-masks-dropped")
ID, TARGET = "sft-liger-loss-masks-dropped", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

COLUMNS = ("input_ids", "position_ids", "seq_lengths", "completion_mask", "assistant_masks")

HAS_ASSISTANTS = "assistant_only_loss" in sft_trainer.SFTConfig.__dataclass_fields__
DROPS_COMPLETIONS = any(target.wrapper == "keep_masks" for target in gates.targets_here(PATCH))

PAIRS = [{"prompt": prompt, "completion": text} for prompt, text in (("ab", "cd"), ("e", "f"), ("ghij", ""))]
CONVERSATIONS = [
    {"messages": [{"role": role, "content": text} for role, text in turns]}
    for turns in ((("user", "x"), ("assistant", "YZ")), (("assistant", "Y"),), (("user", "x"), ("assistant", "Z")))
]
KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str], list[str]]] = {
    "completions": (PAIRS, {"completion_only_loss": True}, ["cd\1", "f\1", "\1"], ["abcd\1", "ef\1", "ghij\1"]),
    "assistants": (CONVERSATIONS, {"assistant_only_loss": True}, ["YZ", "Y", "Z"], ["uxaYZ", "aY", "uxaZ"]),
}
"""Rows, settings, the tokens to train of each row, and all tokens of each."""


class Tokenizer(CharacterTokenizer):
    """Its template has a letter for the role and the content; that of an assistant is in the mask."""

    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})

    def apply_chat_template(self, messages: list[dict[str, str]], *args: Any, **kwargs: Any) -> Any:
        processed = self("".join(message["role"][0] + message["content"] for message in messages))
        mask = [
            int(message["role"] == "assistant" and place > 0)
            for message in messages
            for place in range(1 + len(message["content"]))
        ]
        return {**processed, "assistant_masks": mask}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "assistants" and not HAS_ASSISTANTS:
        pytest.skip("this release has no loss of assistants alone")
    return str(request.param)


def trained(rows: list[dict[str, Any]], **settings: Any) -> list[str]:
    """Return the tokens of each row that are trained, as the collator reads the prepared rows."""
    texts = []
    for row in sft_prepared(sft_trainer, rows, Tokenizer(), **settings):
        mask = row.get("completion_mask") or row.get("assistant_masks") or [1] * len(row["input_ids"])
        texts.append("".join(chr(token) for token, is_in in zip(row["input_ids"], mask, strict=True) if is_in))
    return texts


def trainer_with(**settings: Any) -> Any:
    args = default_arguments(sft_trainer.SFTConfig, max_length=None, **settings)
    return stub_trainer(sft_trainer.SFTTrainer, args, completion_only_loss=bool(args.completion_only_loss))


def prepared(trainer: Any, dataset: Any) -> Any:
    with single_process(sft_trainer):
        return trainer._prepare_dataset(dataset, Tokenizer(), trainer.args, False, None, "train")


@pytest.mark.parametrize("liger", [True, False], ids=["Liger", "without Liger"])
def test_the_tokens_of_the_mask_are_trained(kind: str, liger: bool) -> None:
    rows, settings, expected, _ = KINDS[kind]
    for _ in range(2):
        assert trained(rows, use_liger_kernel=liger, **settings) == expected


def test_trl_trains_all_tokens(kind: str, switch: Any) -> None:
    rows, settings, expected, everything = KINDS[kind]
    is_lost = kind == "assistants" or DROPS_COMPLETIONS
    with switch.off():
        assert trained(rows, use_liger_kernel=True, **settings) == (everything if is_lost else expected)


@pytest.mark.parametrize("made", [Dataset.from_list, stream], ids=["dataset", "stream"])
def test_a_tokenised_dataset_keeps_all_that_the_collator_reads(made: Any) -> None:
    row = {"text": "a", "labels": [1], **{name: [1] for name in COLUMNS}}
    trainer = trainer_with(use_liger_kernel=True, completion_only_loss=True)
    assert list(next(iter(prepared(trainer, made([row]))))) == list(COLUMNS)
    assert tiny.acts(ID, TARGET, trainer) == 1
    assert trainer.args.use_liger_kernel is True


def dataset_of(row: dict[str, Any]) -> Any:
    return Dataset.from_list([row])


MASKED = {"input_ids": [1], "completion_mask": [1], "assistant_masks": [1]}
PAIR, WHOLE = (SimpleNamespace(completion_only_loss=value) for value in (True, False))
SOME, ANSWERS = ({"use_liger_kernel": True, "assistant_only_loss": value} for value in (False, True))


class Prepare:
    """TRL's method: it notes the setting, and returns the dataset."""

    def __init__(self) -> None:
        self.with_liger: list[bool] = []

    def __call__(self, dataset: Any, args: Any) -> Any:
        self.with_liger.append(args.use_liger_kernel)
        return dataset


BOTH = keep_masks, keep_assistant_masks
AS_THEY_ARE: dict[str, tuple[tuple[Any, ...], Any, Any, dict[str, Any]]] = {
    "without Liger": (BOTH, dataset_of(MASKED), PAIR, {**ANSWERS, "use_liger_kernel": False}),
    "a list": (BOTH, [MASKED], PAIR, ANSWERS),
    "texts": (BOTH, dataset_of({"text": "a"}), PAIR, SOME),
    "all tokens": (BOTH, dataset_of({"prompt": "a", "completion": "b"}), WHOLE, SOME),
    "all tokens of a mask": (BOTH, dataset_of({"input_ids": [1], "completion_mask": [1]}), WHOLE, SOME),
    "no setting for assistants": (BOTH, dataset_of(MASKED), WHOLE, {"use_liger_kernel": True}),
    "completions of 0.20": (BOTH[1:], dataset_of({"prompt": "a", "completion_mask": [1]}), PAIR, SOME),
}


@pytest.mark.parametrize(("wrappers", "dataset", "trainer", "settings"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_a_dataset_without_a_mask_is_prepared_by_trl_alone(
    wrappers: tuple[Any, ...], dataset: Any, trainer: Any, settings: dict[str, Any]
) -> None:
    for wrapper in wrappers:
        prepare = Prepare()
        assert wrapper(Call(prepare, trainer, (dataset, SimpleNamespace(**settings)))) is dataset
        assert prepare.with_liger == [settings["use_liger_kernel"]]


ROW = {"labels": [1], "text": "a", **{name: [1] for name in COLUMNS}}


@pytest.mark.parametrize(
    ("wrapper", "trainer", "settings", "row"),
    [
        (keep_masks, PAIR, SOME, {name: ROW[name] for name in ROW if name != "assistant_masks"}),
        (keep_masks, PAIR, {"use_liger_kernel": True}, {"input_ids": [1], "prompt": "a"}),
        (keep_masks, WHOLE, ANSWERS, {"input_ids": [1], "seq_lengths": [1], "text": "a"}),
        (keep_masks, WHOLE, SOME, ROW),
        (keep_assistant_masks, WHOLE, SOME, ROW),
        (keep_assistant_masks, WHOLE, ANSWERS, {"input_ids": [1], "labels": [1]}),
    ],
    ids=["mask", "prompt", "assistants alone", "both masks", "both masks of 0.20", "assistants alone of 0.20"],
)
def test_a_mask_that_is_there_or_will_be_is_kept(wrapper: Any, trainer: Any, settings: Any, row: Any) -> None:
    prepare, args = Prepare(), SimpleNamespace(**settings)
    (kept,) = wrapper(Call(prepare, trainer, (), {"dataset": dataset_of(row), "args": args}))
    assert kept == {name: row[name] for name in COLUMNS if name in row}
    assert prepare.with_liger == [False]
    assert args.use_liger_kernel is True


def test_the_setting_is_as_before_if_trl_raises() -> None:
    def fail(dataset: Any, args: Any) -> None:
        raise ZeroDivisionError

    args = SimpleNamespace(use_liger_kernel=True, assistant_only_loss=True)
    with pytest.raises(ZeroDivisionError):
        keep_masks(Call(fail, PAIR, (dataset_of(MASKED), args)))
    assert args.use_liger_kernel is True
