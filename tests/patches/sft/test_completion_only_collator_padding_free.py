"""The collator pads where the model would mix the sequences of a flattened batch, and nowhere else."""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from trl.trainer import sft_trainer
from trl.trainer.utils import DataCollatorForCompletionOnlyLM

import trl_hotfix
from trl_hotfix.testing import (
    CharacterTokenizer,
    as_tokenizer_of,
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
    tiny_causal_lm,
)

import tiny

ID, TARGET = "completion-only-collator-padding-free", "trl.trainer.sft_trainer:SFTTrainer.__init__"
OTHER = "sft-padding-free-contamination"

TEMPLATE = 9
ROWS = [[3, 5, TEMPLATE, 7, 4], [2, 6, 8, 2, TEMPLATE, 10, 5, 1], [4, TEMPLATE, 6]]

flash_separates = pytest.mark.skipif(
    not hasattr(transformers, "DataCollatorWithFlattening"), reason="this transformers is older than 4.44"
)


class OfAUser(DataCollatorForCompletionOnlyLM):
    """A user's subclass."""


def collator_of(kind: Any = DataCollatorForCompletionOnlyLM, *, padding_free: bool = True) -> Any:
    return kind(response_template=[TEMPLATE], tokenizer=CharacterTokenizer(), padding_free=padding_free)


class Mean(torch.nn.Module):
    """A model whose logits are means over the tokens that it attends to, like an attention whose keys are all equal.

    Like any model that makes its mask itself, it attends to the whole row unless the attention mask excludes tokens.
    """

    def __init__(self, attention: str = "sdpa", **attributes: Any) -> None:
        super().__init__()
        self.lm = tiny_causal_lm()
        self.config = SimpleNamespace(_name_or_path="tiny", _attn_implementation=attention, use_cache=True)
        vars(self).update(attributes)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return (self.lm.weight[input_ids] * mask[..., None]).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]


def arguments(model: Any, collator: Any, **settings: Any) -> dict[str, Any]:
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "completion_only_loss": False}
    return {
        "model": model,
        "args": default_arguments(sft_trainer.SFTConfig, **settings),
        "data_collator": collator,
        **as_tokenizer_of(sft_trainer.SFTTrainer, CharacterTokenizer()),
    }


def made(model: Any, collator: Any, **settings: Any) -> Any:
    with single_process(sft_trainer):
        return constructed(sft_trainer.SFTTrainer, **arguments(model, collator, **settings))


def batch_of(trainer: Any) -> Any:
    return trainer.data_collator([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ROWS])


def loss_and_gradient(trainer: Any) -> tuple[Any, Any]:
    batch = batch_of(trainer)
    return of_tokens(trainer.model, batch["input_ids"], batch["labels"], batch.get("attention_mask"))


def of_tokens(model: Any, input_ids: Any, labels: Any, attention_mask: Any = None) -> tuple[Any, Any]:
    """Return the sum of the cross-entropies of the labels, and its gradient."""
    logits = model(input_ids, attention_mask)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, model.lm.weight)[0]


def of_rows(model: Any, *groups: list[list[int]]) -> tuple[Any, Any]:
    """Return the sum of the losses of groups of sequences, each group in one row, and its gradient."""
    losses, gradients = [], []
    for group in groups:
        tokens = [token for row in group for token in row]
        labels = [token if place > row.index(TEMPLATE) else -100 for row in group for place, token in enumerate(row)]
        loss, gradient = of_tokens(model, torch.tensor([tokens]), torch.tensor([labels]))
        losses.append(loss)
        gradients.append(gradient)
    return torch.stack(losses).sum(), torch.stack(gradients).sum(0)


def assert_close(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", [DataCollatorForCompletionOnlyLM, OfAUser])
def test_each_sequence_has_the_loss_that_it_has_alone(kind: Any, training: bool) -> None:
    for _ in range(2):
        trainer = made(Mean().train(training), collator_of(kind))
        assert_close(loss_and_gradient(trainer), of_rows(trainer.model, *([row] for row in ROWS)))
        assert len(batch_of(trainer)["input_ids"]) == len(ROWS)


def test_trl_computes_the_loss_of_one_long_sequence(switch: Any) -> None:
    with switch.off():
        trainer = made(Mean(), collator_of())
    assert_close(loss_and_gradient(trainer), of_rows(trainer.model, ROWS))
    assert len(batch_of(trainer)["input_ids"]) == 1


@pytest.mark.parametrize("kind", [DataCollatorForCompletionOnlyLM, OfAUser])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_without_flash_attention_it_pads_with_one_warning(kind: Any, attention: str) -> None:
    collator = collator_of(kind)
    with recorded_warnings() as messages:
        trainer = made(Mean(attention), collator)
    assert trainer.data_collator is collator
    assert collator.padding_free is False
    assert tiny.acts(ID, TARGET, trainer) == 1
    (message,) = messages
    assert message.startswith(f"{kind.__name__}(padding_free=True)")
    assert "attn_implementation='flash_attention_2'" in message
    assert "model_init_kwargs" in message


def test_each_trainer_is_warned_once() -> None:
    collator = collator_of()
    with recorded_warnings() as messages:
        trainer = made(Mean(), collator)
        collator.padding_free = True
        # A constructor may run twice, for a subclass that calls it again.
        with single_process(sft_trainer):
            sft_trainer.SFTTrainer.__init__(trainer, **arguments(trainer.model, collator))
        assert len(messages) == 1
        made(Mean(), collator_of())
        assert len(messages) == 2
    assert collator.padding_free is False


@flash_separates
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
@pytest.mark.parametrize("kind", [DataCollatorForCompletionOnlyLM, OfAUser])
def test_with_flash_attention_the_batch_stays_flat(kind: Any, attention: str) -> None:
    collator = collator_of(kind)
    with recorded_warnings() as messages:
        trainer = made(Mean(attention), collator)
    assert trainer.data_collator is collator
    assert collator.padding_free is True
    assert len(batch_of(trainer)["input_ids"]) == 1
    assert tiny.acts(ID, TARGET, trainer) == 0
    assert messages == []


@flash_separates
@pytest.mark.parametrize(
    "attributes",
    [{"_is_stateful": True}, {"active_peft_config": SimpleNamespace(is_prompt_learning=True)}],
    ids=["stateful", "prompt tuning"],
)
def test_a_stateful_or_prompt_tuned_model_is_padded(attributes: dict[str, Any]) -> None:
    collator = collator_of()
    made(Mean("flash_attention_2", **attributes), collator)
    assert collator.padding_free is False


def test_flash_attention_without_position_ids_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(ModuleType):
        """transformers before 4.44."""

        def __getattr__(self, name: str) -> Any:
            if name == "DataCollatorWithFlattening":
                raise AttributeError(name)
            return getattr(transformers, name)

    monkeypatch.setitem(sys.modules, "transformers", Older("transformers"))
    collator = collator_of()
    made(Mean("flash_attention_2"), collator)
    assert collator.padding_free is False


class Unrelated:
    """Another collator of a user's, with an attribute of the same name."""

    padding_free = True

    def __call__(self, examples: Any) -> Any:
        return {"input_ids": examples[:1]}


def test_a_padding_or_unrelated_collator_is_left_alone() -> None:
    # A user's copy of the collator of 0.9.6, which cannot flatten.
    older = type("DataCollatorForCompletionOnlyLM", (), {})()
    with recorded_warnings() as messages:
        for collator in (collator_of(padding_free=False), collator_of(OfAUser, padding_free=False), Unrelated(), older):
            before = dict(vars(collator))
            trainer = made(Mean(), collator)
            assert trainer.data_collator is collator
            assert vars(collator) == before
            assert tiny.acts(ID, TARGET, trainer) == 0
    assert messages == []
    assert Unrelated.padding_free


@pytest.mark.parametrize("as_it_is_used", [copy.copy, copy.deepcopy, lambda collator: collator.torch_call])
def test_later_copies_and_bound_methods_pad_too(as_it_is_used: Any) -> None:
    trainer = made(Mean(), collator_of())
    trainer.data_collator = as_it_is_used(trainer.data_collator)
    assert len(batch_of(trainer)["input_ids"]) == len(ROWS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [ID, OTHER])
def test_it_pads_in_either_order_with_the_patch_for_trls_own_flattening(workers: int, first: str, switch: Any) -> None:
    if "padding_free" not in sft_trainer.SFTConfig.__dataclass_fields__:
        pytest.skip("this release flattens nothing itself")
    if first == ID:
        with trl_hotfix.patched(OTHER):
            trainer = made(Mean(), collator_of(), dataloader_num_workers=workers)
    else:
        with switch.off(), trl_hotfix.patched(OTHER), switch.on():
            trainer = made(Mean(), collator_of(), dataloader_num_workers=workers)
    # With workers the other patch binds torch_call to the instance.
    assert len(batch_of(trainer)["input_ids"]) == len(ROWS)
