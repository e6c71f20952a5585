"""A model whose attention drops its soft cap gets one line, or attends eagerly; other models get no line."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from trl_hotfix.testing import stub_trainer

import tiny

ID = "gemma2-softcap-dropped-by-sdpa"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}.create_optimizer"


def gemma2(cap: float | None = 0.5, **settings: Any) -> Any:
    """Return a Gemma 2 of two layers."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        attn_logit_softcapping=cap,
        query_pre_attn_scalar=4,
        initializer_range=0.5,
    )
    return transformers.AutoModelForCausalLM.from_config(config, **settings)


def llama() -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))


def stub(model: Any, *, main: bool = True, precomputed: bool = False, **state: Any) -> Any:
    """Return a trainer that is about to make its optimizer."""
    args = SimpleNamespace(precompute_ref_log_probs=precomputed)
    trainer = stub_trainer(CLASS, args, **{"optimizer": "the user's", "model": model, **state})
    trainer.accelerator = SimpleNamespace(is_main_process=main)
    return trainer


def loss_of(model: Any) -> float:
    ids = torch.arange(10)[None]
    return float(model(input_ids=ids, labels=ids).loss)


def attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)


def test_a_dropped_cap_is_reported_with_what_to_do(messages: list[str]) -> None:
    trainer = stub(gemma2())
    assert trainer.create_optimizer() == "the user's"
    assert messages == [
        f"{CLASS.__name__}: 2 layers of the model train without the soft cap of their attention "
        "(attn_logit_softcapping=0.5), which sdpa drops: it was trained with it, and vLLM samples with it. Load it "
        "with attn_implementation='eager', or set TRL_HOTFIX_OPTIONS=gemma2-softcap-dropped-by-sdpa.attention=eager. "
        "Either takes more memory"
    ]
    assert attention_of(trainer.model) == "sdpa"
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_a_trainer_is_reported_once_and_another_one_again(messages: list[str]) -> None:
    first, second = stub(gemma2()), stub(gemma2())
    for trainer in (first, first, second):
        trainer.create_optimizer()
    assert len(messages) == 2


def test_the_layers_of_an_adapter_s_base_are_found(messages: list[str]) -> None:
    import peft

    stub(peft.get_peft_model(gemma2(), peft.LoraConfig(target_modules=["q_proj"]))).create_optimizer()
    assert len(messages) == 1


@pytest.mark.parametrize(
    "made",
    [lambda: gemma2(None), lambda: gemma2(attn_implementation="eager"), llama],
    ids=["no cap", "eager", "Llama"],
)
def test_a_healthy_model_gets_no_line_and_keeps_its_attention(messages: list[str], switch: Any, made: Any) -> None:
    model = made()
    attention, trainer = attention_of(model), stub(model)
    trainer.create_optimizer()
    assert tiny.acts(ID, TARGET, trainer) == 0
    with switch.on(attention="eager"):
        stub(model).create_optimizer()
    assert messages == []
    assert attention_of(model) == attention


def test_the_main_process_alone_says_it(messages: list[str]) -> None:
    stub(gemma2(), main=False).create_optimizer()
    assert messages == []


def test_without_the_patch_there_is_no_line(messages: list[str], switch: Any) -> None:
    with switch.off():
        stub(gemma2()).create_optimizer()
    assert messages == []


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_with_the_option_model_and_reference_have_their_cap(messages: list[str], switch: Any, training: bool) -> None:
    expected, model, reference = loss_of(gemma2(attn_implementation="eager")), gemma2(), gemma2()
    assert abs(loss_of(model) - expected) > 0.01
    trainer = stub(model, ref_model=reference)
    with switch.on(attention="eager"):
        trainer.create_optimizer()
        for each in (model, reference):
            each.train(training)
            assert loss_of(each) == expected
    assert messages == []
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_with_the_option_a_reference_of_another_kind_stays(messages: list[str], switch: Any) -> None:
    model, reference = gemma2(), llama()
    with switch.on(attention="eager"):
        stub(model, ref_model=reference).create_optimizer()
        stub(llama(), ref_model=None).create_optimizer()
    assert (attention_of(model), attention_of(reference)) == ("eager", "sdpa")
    assert messages == []


def test_a_reference_that_was_computed_before_has_a_policy_like_it(messages: list[str], switch: Any) -> None:
    trainer = stub(gemma2(), precomputed=True)
    with switch.on(attention="eager"):
        trainer.create_optimizer()
    assert attention_of(trainer.model) == "sdpa"
    assert len(messages) == 1


def test_a_config_without_a_reference_is_none_that_was_computed_before(switch: Any) -> None:
    trainer = stub(gemma2())
    del trainer.args.precompute_ref_log_probs
    with switch.on(attention="eager"):
        trainer.create_optimizer()
    assert attention_of(trainer.model) == "eager"
