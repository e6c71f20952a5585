"""The collator pads where the model would mix sequences, and nowhere else."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.patches.sft import completion_only_collator_padding_free as patch
from trl_hotfix.patches.sft import sft_padding_free_contamination as other


class DataCollatorForCompletionOnlyLM:
    """A collator with the name of TRL's, which 0.20.0 removed."""

    def __init__(self, *, padding_free: bool = True) -> None:
        self.padding_free = padding_free

    def torch_call(self, examples: Any) -> str:
        return "flattened" if self.padding_free else "padded"


class Trainer:
    def __init__(self, collator: Any, model: Any, workers: int = 0) -> None:
        self.data_collator = collator
        self.model = model
        self.args = SimpleNamespace(padding_free=False, dataloader_num_workers=workers)


def made(collator: Any, model: Any, *wrappers: Any, workers: int = 0) -> Trainer:
    """Construct a trainer through these wrappers, the first of which is the outermost."""
    trainer: Trainer = object.__new__(Trainer)

    def through(wrapper: Any, inner: Any) -> Any:
        return lambda *args, **kwargs: wrapper(inner, trainer, args, kwargs)

    init: Any = trainer.__init__  # type: ignore[misc]
    for wrapper in reversed(wrappers or (patch.pad_what_the_model_would_mix,)):
        init = through(wrapper, init)
    init(collator, model, workers=workers)
    return trainer


def a_model(attention: str = "sdpa", **attributes: Any) -> SimpleNamespace:
    config = SimpleNamespace(_attn_implementation=attention, use_cache=True)
    return SimpleNamespace(config=config, modules=lambda: (), **attributes)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_with_flash_attention_the_batch_stays_flat(attention: str, caplog: pytest.LogCaptureFixture) -> None:
    collator = DataCollatorForCompletionOnlyLM()
    assert made(collator, a_model(attention)).data_collator is collator
    assert collator.padding_free is True
    assert caplog.records == []


class OfAUser(DataCollatorForCompletionOnlyLM):
    pass


@pytest.mark.parametrize("kind", [DataCollatorForCompletionOnlyLM, OfAUser])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_without_flash_attention_it_pads_with_one_warning(
    kind: Any, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    collator = kind()
    with caplog.at_level(logging.WARNING, "trl_hotfix"):
        made(collator, a_model(attention))
    assert collator.padding_free is False
    (record,) = caplog.records
    assert "attn_implementation='flash_attention_2'" in record.getMessage()
    assert "model_init_kwargs" in record.getMessage()


@pytest.mark.parametrize(
    "attributes", [{"_is_stateful": True}, {"active_peft_config": SimpleNamespace(is_prompt_learning=True)}]
)
def test_a_stateful_or_prompt_tuned_model_is_padded(attributes: dict[str, Any]) -> None:
    collator = DataCollatorForCompletionOnlyLM()
    made(collator, a_model("flash_attention_2", **attributes))
    assert collator.padding_free is False


def test_flash_attention_without_position_ids_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    collator = DataCollatorForCompletionOnlyLM()
    made(collator, a_model("flash_attention_2"))
    assert collator.padding_free is False


class Unrelated:
    padding_free = True


def test_a_padding_or_unrelated_collator_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for collator in (DataCollatorForCompletionOnlyLM(padding_free=False), Unrelated(), None):
        before = dict(vars(collator)) if collator is not None else {}
        assert made(collator, a_model()).data_collator is collator
        assert (dict(vars(collator)) if collator is not None else {}) == before
    assert caplog.records == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_it_pads_in_either_order_with_the_other_patch(workers: int, turned: bool) -> None:
    wrappers = (patch.pad_what_the_model_would_mix, other.fit_the_collator)
    collator = DataCollatorForCompletionOnlyLM()
    trainer = made(collator, a_model(), *(wrappers[::-1] if turned else wrappers), workers=workers)
    # With workers the other patch binds torch_call to the instance.
    assert trainer.data_collator.torch_call([]) == "padded"
