"""Prompts that have a BOS keep that one alone, and every other prompt is tokenized as by TRL."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from trl_hotfix.testing import StopConstruction, default_arguments, single_process, stub_that_generates, tiny_causal_lm

import tiny

ID = "grpo-double-bos-pretemplated-prompt"
PAD, EOS, BOS = 0, 1, 62
GIVEN = ["w59 w1 w2 w3", "w4", "w59 w5 w6", "w59 w59 w7", "w59", ""]
ONCE = [[BOS, 4, 5, 6], [BOS, 7], [BOS, 8, 9], [BOS, BOS, 10], [BOS], [BOS]]
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
CHATS = [[{"role": "user", "content": text}] for text in ("w1 w2 w3", "w4")]
METHODS = ("_tokenize_prompts_untruncated", "_tokenize_prompts", "_generate_single_turn")


def modules() -> Iterable[tuple[str, tuple[ModuleType, str]]]:
    """Return the trainers of this release that leave the special tokens to the tokenizer: module and method."""
    for name in ("GRPO", "RLOO", "DPPO", "SDPO", "SDFT", "Distillation"):
        for home in ("trl.trainer", f"trl.experimental.{name.lower()}"):
            try:
                module = import_module(f"{home}.{name.lower()}_trainer")
            except ImportError:
                continue
            own = vars(getattr(module, f"{name}Trainer"))
            method = next((method for method in METHODS if method in own), None)
            # RLOO of 0.26 adds none, as GRPO up to 0.25.
            if method and "add_special_tokens" not in str(inspect.unwrap(own[method]).__code__.co_consts):
                yield name, (module, method)


TRAINERS = dict(modules())
each_trainer = pytest.mark.parametrize("name", TRAINERS)
each_that_generates = pytest.mark.parametrize(
    "name", [name for name, (_, method) in TRAINERS.items() if method == "_generate_single_turn"]
)
each_apart = pytest.mark.parametrize(
    "name", [name for name, (_, method) in TRAINERS.items() if method != "_generate_single_turn"]
)


def words(single: str = "w59 $A", bos_token: str | None = "w59") -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.bos_token, tokenizer.chat_template = "right", bos_token, TEMPLATE
    specials = [("w59", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


def stub(name: str, tokenizer: Any = None, *, training: bool = True, **attributes: Any) -> Any:
    def generate(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        trainer.given = [input_ids, attention_mask]
        return torch.cat([input_ids, torch.ones_like(input_ids[:, :1])], dim=1)

    def generate_batch(inputs: Any, **kwargs: Any) -> Any:
        trainer.given = inputs
        return {row: SimpleNamespace(generated_tokens=[EOS]) for row in range(len(inputs))}

    module, method = TRAINERS[name]
    model = tiny_causal_lm().train(training)
    model.generate, model.generate_batch = generate, generate_batch
    trainer = stub_that_generates(
        getattr(module, f"{name}Trainer"),
        default_arguments(getattr(module, f"{name}Config")),
        model,
        processing_class=words() if tokenizer is None else tokenizer,
        generation_config=None,
        generation_kwargs={},
        environment_factories=None,
        _is_vlm=False,
        **attributes,
    )
    trainer.module, trainer.target = module, method
    return trainer


def returned(trainer: Any, prompts: Any) -> Any:
    with single_process(trainer.module):
        return getattr(trainer, trainer.target)(list(prompts))


def ids_of(trainer: Any, prompts: Any) -> list[list[int]]:
    result = returned(trainer, prompts)
    ids: list[list[int]] = result[0] if isinstance(result, tuple) else result
    return ids


def acts(trainer: Any) -> int | None:
    trainer_class = type(trainer).__mro__[1]
    return tiny.acts(ID, f"{trainer_class.__module__}:{trainer_class.__name__}.{trainer.target}", trainer)


@each_trainer
@pytest.mark.parametrize("training", [True, False])
def test_each_prompt_of_each_batch_begins_once(name: str, training: bool) -> None:
    trainer = stub(name, training=training)
    assert ids_of(trainer, GIVEN) == ONCE
    assert ids_of(trainer, GIVEN[::-1]) == ONCE[::-1]
    assert ids_of(trainer, GIVEN[:1]) == ONCE[:1]
    assert ids_of(trainer, GIVEN[1:2]) == ONCE[1:2]
    assert acts(trainer) == 3


@each_trainer
def test_trl_puts_a_beginning_before_each_prompt(name: str, switch: Any) -> None:
    with switch.off():
        twice = [[BOS, *row] if text.startswith("w59") else row for row, text in zip(ONCE, GIVEN, strict=True)]
        assert ids_of(stub(name), GIVEN) == twice


UNAFFECTED = {
    "no text has a BOS": (words(), ["w1", "w2 w3"]),
    "the BOS is not the first word": (words(), ["w1 w59", "w2"]),
    "messages": (words(), CHATS),
    "no BOS is added": (words("$A"), ["w59 w59 w1", "w59 w1"]),
    "a BOS is added behind": (words("$A w59"), ["w59 w59 w1", "w59 w1"]),
    "another token is added": (words("<eos> $A"), ["w59 w59 w1", "w59 w1"]),
    "there is no BOS": (words(bos_token=None), ["w59 w1"]),
}


@each_trainer
@pytest.mark.parametrize(("tokenizer", "prompts"), UNAFFECTED.values(), ids=list(UNAFFECTED))
def test_other_prompts_are_tokenized_as_by_trl(name: str, tokenizer: Any, prompts: Any, switch: Any) -> None:
    trainer = stub(name, tokenizer)
    patched = ids_of(trainer, prompts)
    assert acts(trainer) == 0
    with switch.off():
        assert ids_of(trainer, prompts) == patched


@each_trainer
def test_an_end_that_is_added_stays(name: str) -> None:
    assert ids_of(stub(name, words("w59 $A <eos>")), GIVEN[:2]) == [[*row, EOS] for row in ONCE[:2]]


@each_trainer
def test_blanks_of_sentencepiece_stay_as_they_are(name: str) -> None:
    """Such a tokenizer puts a blank before a text, and none behind a BOS that stands in the text."""
    tokenizer = words()
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2, "w1": 3, "\u2581w1": 4, "w59": BOS}
    tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.add_special_tokens({"bos_token": "w59"})
    assert ids_of(stub(name, tokenizer), ["w59w1", "w1"]) == [[BOS, 3], [BOS, 4]]


class Processor:
    """A processor of texts without images. Only its tokenizer has a BOS."""

    def __init__(self) -> None:
        self.tokenizer = words()

    def __call__(self, text: Any, **settings: Any) -> Any:
        return self.tokenizer(text, **settings)


@each_apart
def test_a_processor_begins_texts_once(name: str) -> None:
    assert ids_of(stub(name, Processor()), GIVEN) == ONCE


@each_apart
def test_the_rest_of_the_result_is_trls(name: str) -> None:
    result = returned(stub(name), GIVEN)
    assert isinstance(result, list) if name in ("SDPO", "SDFT") else result[1:] == (None, {})


@pytest.mark.parametrize("name", [name for name in TRAINERS if name in ("SDPO", "SDFT")])
@pytest.mark.parametrize("longest", [1, 2, 3, 4])
def test_a_prompt_that_is_cut_on_the_left_begins_once_at_most(name: str, longest: int) -> None:
    trainer = stub(name, max_prompt_length=longest)
    assert trainer._tokenize_prompts(GIVEN[:3]) == [row[-longest:] for row in ONCE[:3]]


@each_that_generates
def test_the_padding_is_on_the_left_and_masked(name: str) -> None:
    trainer = stub(name)
    returned(trainer, GIVEN)
    ids, mask = (rows.tolist() for rows in trainer.given)
    assert ids == [[PAD] * (4 - len(row)) + row for row in ONCE]
    assert mask == [[0] * (4 - len(row)) + [1] * len(row) for row in ONCE]
    assert trainer.given[0].dtype is trainer.given[1].dtype is torch.long


@each_that_generates
def test_continuous_batching_is_given_rows_without_padding(name: str) -> None:
    trainer = stub(name, use_transformers_paged=True)
    assert ids_of(trainer, GIVEN) == ONCE
    assert trainer.given == ONCE


@each_that_generates
def test_a_processor_stays_as_it_is(name: str, switch: Any) -> None:
    trainer = stub(name, Processor())
    patched = ids_of(trainer, GIVEN)
    assert acts(trainer) == 0
    with switch.off():
        assert ids_of(trainer, GIVEN) == patched


@each_that_generates
def test_vllm_is_given_the_prompts_as_they_are(name: str) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise StopConstruction

    trainer = stub(name)
    tokenizer = trainer.processing_class
    vars(trainer).update(use_vllm=True, vllm_mode="server", _last_loaded_step=-1, _move_model_to_vllm=stop)
    trainer.vllm_generation = SimpleNamespace(sync_weights=stop)
    with pytest.raises(StopConstruction):
        returned(trainer, GIVEN)
    assert acts(trainer) == 0
    assert trainer.processing_class is tokenizer


@each_trainer
def test_the_users_tokenizer_stays_as_it_is(name: str) -> None:
    trainer = stub(name)
    tokenizer = trainer.processing_class
    ids_of(trainer, GIVEN)
    assert trainer.processing_class is tokenizer
    assert tokenizer("w59 w1")["input_ids"] == [BOS, BOS, 4]
