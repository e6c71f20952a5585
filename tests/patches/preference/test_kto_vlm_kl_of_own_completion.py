"""The KL term of a batch of one row is that of the row before, and that of the first of an evaluation the last row."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import kto_trainer

from trl_hotfix import witness
from trl_hotfix.testing import CharacterProcessor, messages, stream, stub_trainer

if not hasattr(kto_trainer, "DataCollatorForVisionUnpairedPreference"):
    from trl.experimental.kto import kto_trainer  # type: ignore[no-redef]

ID = "kto-vlm-kl-of-own-completion"
COMPLETIONS = ("b", "cd", "efg", "h")


class WithTypes(CharacterProcessor):
    """A processor that marks the tokens of images, as those of Gemma 3 and Qwen-VL do."""

    def __call__(self, images: Any = None, text: Sequence[str] = (), *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = super().__call__(images, text, *args, **kwargs)
        types = (batch["input_ids"] == self.image_token_id).long()
        return {**batch, "token_type_ids": types + 4 * batch["attention_mask"], "mm_token_type_ids": types}


def rows(kind: str = "messages") -> list[dict[str, Any]]:
    """Return four rows whose prompts and completions differ in length."""
    made: list[dict[str, Any]] = []
    for index, text in enumerate(COMPLETIONS):
        prompt, completion = messages("u" + "q" * index), messages(f"a{text}")
        if kind == "texts":
            made.append({"prompt": "\2" + "q" * index, "completion": text})
        else:
            made.append({"prompt": prompt, "completion": completion})
    return [{**row, "images": [index], "label": True} for index, row in enumerate(made)]


def prompt(index: int, kind: str = "messages") -> str:
    return ("\2\2" if kind == "texts" else "u\2\2") + "q" * index + ("" if kind == "texts" else "\1a")


def answer(index: int, kind: str = "messages") -> str:
    return COMPLETIONS[index] + ("" if kind == "texts" else "\1")


def collator_of(processor: Any = None, **settings: Any) -> Any:
    settings = {"calculate_kl": True, **settings}
    return kto_trainer.DataCollatorForVisionUnpairedPreference(processor or CharacterProcessor(), **settings)


def begin(collator: Any, dataset: Any) -> None:
    """Begin an evaluation of ``dataset``, which ends at once since the trainer has no arguments."""
    trainer = stub_trainer(kto_trainer.KTOTrainer, SimpleNamespace(), data_collator=collator)
    with suppress(AttributeError):
        trainer.evaluation_loop(SimpleNamespace(dataset=dataset), "")


def tensor(batch: Any, name: str, prefix: str = "KL_") -> Any:
    """Return a tensor of the sequences of the KL term, by the name that it has since 1.8.0."""
    return batch[f"{prefix}{name}"] if f"{prefix}{name}" in batch else batch[f"{prefix}completion_{name}"]


def texts(batch: Any, prefix: str = "KL_", mask: str = "attention_mask") -> list[str]:
    tokens = tensor(batch, "input_ids", prefix) * tensor(batch, mask, prefix)
    return ["".join(chr(token) for token in row if token > 0) for row in tokens.tolist()]


def acts() -> int:
    target = f"{kto_trainer.__name__}:DataCollatorForVisionUnpairedPreference.torch_call"
    return witness.PROCESS.total(ID, target).acted


@pytest.mark.parametrize("kind", ["messages", "texts"])
def test_each_row_of_each_evaluation_has_the_completion_of_the_row_before(kind: str) -> None:
    collator, dataset = collator_of(), rows(kind)
    for _ in range(2):
        begin(collator, dataset)
        before = acts()
        for index, row in enumerate(dataset):
            batch = collator([{**row}])
            assert texts(batch) == [prompt(index, kind) + answer(index - 1, kind)]
            assert texts(batch, "") == [prompt(index, kind) + answer(index, kind)]
            assert texts(batch, mask="completion_mask") == [answer(index - 1, kind)]
            assert texts(batch, "", "completion_mask") == [answer(index, kind)]
            assert batch["pixel_values"] == [[index]]
        assert acts() == before + 4


def test_trl_takes_the_own_completion(switch: Any) -> None:
    with switch.off():
        collator = collator_of()
        begin(collator, rows())
        assert [texts(collator([row])) for row in rows()] == [[prompt(index) + answer(index)] for index in range(4)]


def test_a_last_batch_of_one_row_has_the_last_completion_of_the_batch_before() -> None:
    collator = collator_of()
    collator(rows()[:3])
    assert texts(collator(rows()[3:])) == [prompt(3) + answer(2)]


@pytest.mark.parametrize("max_length", [4, 7])
def test_the_sequences_are_cut(max_length: int) -> None:
    collator = collator_of(max_length=max_length)
    collator(rows()[:1])
    batch = collator(rows()[1:2])
    assert texts(batch) == [(prompt(1) + answer(0))[:max_length]]
    assert texts(batch, "") == [(prompt(1) + answer(1))[:max_length]]


def test_the_types_of_tokens_are_those_of_the_other_completion() -> None:
    collator = collator_of(WithTypes())
    begin(collator, rows())
    batch = collator(rows()[:1])
    of_two = collator([rows()[0], rows()[3]])
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        length = len(prompt(0) + answer(3))
        assert tensor(batch, name).tolist() == tensor(of_two, name)[:1, :length].tolist()


def test_another_worker_process_goes_on_from_there() -> None:
    collator = collator_of()
    begin(collator, rows())
    assert texts(pickle.loads(pickle.dumps(collator))(rows()[:1])) == [prompt(0) + answer(3)]


@pytest.mark.parametrize("settings", [{}, {"calculate_kl": False}], ids=["rows", "no KL"])
def test_batches_without_such_a_row_are_those_of_trl(settings: dict[str, Any], switch: Any) -> None:
    sizes = ((0, 2), (2, 4)) if not settings else ((0, 1), (1, 2), (2, 4))
    collator, before = collator_of(**settings), acts()
    patched = [collator(rows()[slice(*size)]) for size in sizes]
    assert acts() == before
    with switch.off():
        expected = [collator_of(**settings)(rows()[slice(*size)]) for size in sizes]
    for one, other in zip(patched, expected, strict=True):
        assert list(one) == list(other)
        assert all(
            torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one if "p" not in name
        )


def test_the_first_row_of_all_has_its_own() -> None:
    before = acts()
    assert texts(collator_of()(rows()[:1])) == [prompt(0) + answer(0)]
    assert acts() == before


def test_a_stream_has_no_last_row() -> None:
    collator = collator_of()
    collator(rows()[:2])
    begin(collator, stream([{"completion": "z"}]))
    assert texts(collator(rows()[2:3])) == [prompt(2) + answer(1)]


@pytest.mark.parametrize("collator", [SimpleNamespace(), SimpleNamespace(calculate_kl=False)], ids=["own", "no KL"])
def test_another_collator_is_left_as_it_is(collator: Any) -> None:
    given = dict(vars(collator))
    begin(collator, rows())
    assert vars(collator) == given
