"""The row of an end of sequence that is the padding token gets its gradient; every other embedding stays as it is."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from trl_hotfix.testing import stub_trainer

import tiny

ID = "eos-row-frozen-in-second-stage"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}.create_optimizer"
SIZES = {
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def llama(pad: int | None = 1, eos: Any = 1, listed: Any = None, **settings: Any) -> Any:
    """Return a model whose padding token is ``pad``. Its generation config ends at ``listed``."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, pad_token_id=pad, bos_token_id=None, eos_token_id=eos, **settings)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = listed
    return model


def same_without(model: Any, **settings: Any) -> Any:
    """Return a model of the same weights without a padding token."""
    other = llama(pad=None, **settings)
    other.load_state_dict(model.state_dict())
    return other


def begin(model: Any, processor: Any = None) -> int | None:
    """Begin to train, and return in how many calls the patch acted."""
    kept = {"optimizer": "the user's", "is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    trainer = stub_trainer(CLASS, SimpleNamespace(), model=model, processing_class=processor, **kept)
    assert trainer.create_optimizer() == "the user's"
    return tiny.acts(ID, TARGET, trainer)


def row_gradients(model: Any, mask: list[list[int]] | None = None) -> Any:
    """Return the gradient of the embedding for a row that ends in the middle, and one that is padded behind its end."""
    tokens = torch.tensor([[2, 1, 3, 4], [5, 6, 1, 1]])
    mask = mask or [[1, 1, 1, 1], [1, 1, 1, 0]]
    labels = tokens.masked_fill(~torch.tensor(mask).bool(), -100)
    model(input_ids=tokens, attention_mask=torch.tensor(mask), labels=labels).loss.backward()
    return model.get_input_embeddings().weight.grad


def test_the_row_gets_its_gradient_and_the_others_keep_theirs(switch: Any) -> None:
    with switch.off():
        frozen = llama()
        begin(frozen)
    model = llama()
    assert begin(model) == 1
    measured, as_it_is, right = (row_gradients(each) for each in (model, frozen, same_without(model)))
    assert measured.equal(right)
    assert measured[1].any()
    assert not as_it_is[1].any()
    others = [row for row in range(8) if row != 1]
    assert measured[others].equal(as_it_is[others])
    assert model.config.pad_token_id == 1


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 0, 1, 1], [1, 1, 0, 0]]])
def test_padding_still_gets_none(mask: list[list[int]]) -> None:
    model = llama()
    tokens = torch.tensor([[2, 3, 3, 4], [5, 6, 7, 7]])
    tokens[torch.tensor(mask) == 0] = 1
    assert begin(model) == 1
    labels = tokens.masked_fill(tokens == 1, -100)
    # A padding token in front of a text predicts nothing.
    labels[:, 2] = -100
    model(input_ids=tokens, attention_mask=torch.tensor(mask), labels=labels).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert not gradient[1].any()
    assert gradient[2 if mask[0][0] else 3].any()


@pytest.mark.parametrize(
    ("model", "processor"),
    [
        ({"eos": 1}, None),
        ({"eos": [5, 1]}, None),
        ({"eos": 5, "listed": 1}, None),
        ({"eos": None, "listed": [5, 1]}, None),
        ({"eos": 5}, SimpleNamespace(eos_token_id=1)),
        ({"eos": 5}, SimpleNamespace(eos_token_id=6, tokenizer=SimpleNamespace(eos_token_id=1))),
        ({"eos": 1}, SimpleNamespace(eos_token_id=None)),
    ],
    ids=["config", "list", "generation", "generation's list", "tokenizer", "processor", "a tokenizer without"],
)
def test_whoever_names_the_end_is_heard(model: dict[str, Any], processor: Any) -> None:
    made = llama(**model)
    assert begin(made, processor) == 1
    assert made.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize("pad", [0, None, 2])
def test_a_padding_token_that_is_no_end_stays(pad: int | None) -> None:
    model = llama(pad=pad)
    assert begin(model, SimpleNamespace(eos_token_id=1)) == 0
    assert model.get_input_embeddings().padding_idx == pad


def test_a_frozen_embedding_stays() -> None:
    model = llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    assert begin(model) == 0
    assert model.get_input_embeddings().padding_idx == 1


def test_the_frozen_embedding_beneath_an_adapter_stays() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    assert begin(model) == 0


def test_a_copy_that_peft_trains_gets_its_gradient() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    assert begin(model) == 1
    assert row_gradients(model.base_model)[1].any()


def test_an_adapter_of_the_embedding_gets_its_gradient(switch: Any) -> None:
    rows = []
    for context in (switch.off(), switch.on()):
        with context:
            model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["embed_tokens"]))
            (a, b) = (getattr(model.get_input_embeddings(), f"lora_embedding_{name}")["default"] for name in "AB")
            torch.nn.init.ones_(a)
            torch.nn.init.ones_(b)
            begin(model)
            tokens = torch.tensor([[2, 1, 3, 4]])
            model(input_ids=tokens, labels=tokens).loss.backward()
            rows.append(a.grad[:, 1].any().item())
    assert rows == [False, True]


def test_tied_weights_have_the_gradient_of_both_ends() -> None:
    model = llama(tie_word_embeddings=True)
    begin(model)
    assert row_gradients(model).equal(row_gradients(same_without(model, tie_word_embeddings=True)))


@pytest.mark.parametrize(
    "model",
    [torch.nn.Linear(1, 1), SimpleNamespace(get_input_embeddings=lambda: None)],
    ids=["no method", "no embedding"],
)
def test_a_model_without_an_embedding_is_left_alone(model: Any) -> None:
    assert begin(model) == 0


def test_it_acts_once_for_each_trainer(switch: Any) -> None:
    first, second = llama(), llama()
    assert (begin(first), begin(second), begin(first)) == (1, 1, 0)
