from __future__ import annotations

import contextlib
import gc
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.authoring import (
    GeneratedLabels,
    copies_of_a_loss_of_all_gpus,
    copies_of_the_loss,
    micro_batches,
    plain_model,
    prepared_first,
)


def test_micro_batches_are_counted_or_taken_from_the_setting() -> None:
    args = SimpleNamespace(gradient_accumulation_steps=4)
    assert micro_batches(SimpleNamespace(args=args)) == 4
    assert micro_batches(SimpleNamespace(args=args, current_gradient_accumulation_steps=3)) == 3
    assert micro_batches(SimpleNamespace(args=args, current_gradient_accumulation_steps=None)) == 4


def test_the_plain_model_is_asked_for_once_and_not_kept_alive() -> None:
    class Model: ...

    class Wrapped:
        def __init__(self) -> None:
            self.module = Model()

    asked: list[Any] = []

    def unwrap_model(model: Any) -> Any:
        asked.append(model)
        return getattr(model, "module", model)

    trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=unwrap_model))
    wrapped, plain = Wrapped(), Model()
    for _ in range(2):
        assert plain_model(trainer, wrapped) is wrapped.module
        assert plain_model(trainer, plain) is plain
    assert asked == [wrapped, plain]
    asked.clear()
    references = weakref.ref(wrapped), weakref.ref(plain)
    del wrapped, plain
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize(("average", "copies"), [(False, 1), (True, 4)])
def test_an_averaged_loss_is_multiplied_by_the_ranks(average: bool, copies: int) -> None:
    pytest.importorskip("transformers")
    trainer = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=average, n_gpu=1),
        accelerator=SimpleNamespace(num_processes=4),
        get_tp_size=lambda: 1,
    )
    assert copies_of_the_loss(trainer) == copies


@pytest.mark.parametrize(("gpus", "copies"), [(1, 4), (2, 1)])
def test_several_gpus_of_a_process_compute_one_loss(gpus: int, copies: int) -> None:
    pytest.importorskip("transformers")
    trainer = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=gpus),
        accelerator=SimpleNamespace(num_processes=4),
        get_tp_size=lambda: 1,
    )
    assert copies_of_a_loss_of_all_gpus(trainer) == copies


def test_generated_labels_are_told_by_value_until_they_are_forgotten() -> None:
    torch = pytest.importorskip("torch")
    generated, labels = GeneratedLabels(), torch.tensor([[1, 2, -100]])
    assert not generated.are(labels)
    generated.note(labels)
    assert generated.are(labels.clone())
    assert not generated.are(labels + 1)
    assert not generated.are(labels[:, :2])
    generated.note(labels + 1)
    assert not generated.are(labels)
    generated.forget()
    assert not generated.are(labels + 1)


def test_the_main_process_maps_first_and_streams_are_lazy() -> None:
    datasets = pytest.importorskip("datasets")
    entered: list[str] = []

    @contextlib.contextmanager
    def main_process_first() -> Any:
        entered.append("main first")
        yield

    module = ModuleType("trl.trainer.made_up")
    module.PartialState = lambda: SimpleNamespace(main_process_first=main_process_first)  # type: ignore[attr-defined]
    settings = SimpleNamespace(dataset_num_proc=None)
    dataset = datasets.Dataset.from_list([{"text": "a"}])

    def doubled(row: dict[str, str]) -> dict[str, str]:
        return {"text": row["text"] * 2}

    streamed = prepared_first(module, dataset.to_iterable_dataset(), doubled, settings, "Doubling")
    assert entered == []
    assert list(streamed) == [{"text": "aa"}]
    assert list(prepared_first(module, dataset, doubled, settings, "Doubling")) == [{"text": "aa"}]
    assert entered == ["main first"]
