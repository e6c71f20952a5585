"""The model is given one BOS before each plain prompt, and every other prompt as TRL gives it."""

from __future__ import annotations

import inspect
from contextlib import suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import StopConstruction, default_arguments, single_process, stub_that_generates, tiny_causal_lm

import tiny

ID = "grpo-plain-prompt-without-bos"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.module: target for target in gates.targets_here(PATCH)}
each_trainer = pytest.mark.parametrize("name", TARGETS)

BOS, EOS = 62, 1
PROMPTS = ["w1 w2 w3", "w4", "w5 w6"]
BEGUN = [f"w59 {prompt}" for prompt in PROMPTS]
ROWS = [[BOS, 4, 5, 6], [BOS, 7], [BOS, 8, 9]]
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]


def words(single: str = "w59 $A", bos_token: str | None = "w59") -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.bos_token, tokenizer.chat_template = "left", bos_token, TEMPLATE
    specials = [("w59", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


def stub(name: str, tokenizer: Any = None, *, training: bool = True, **attributes: Any) -> Any:
    """Return a trainer that notes the prompts of the model without padding, and stops."""

    def generate(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        trainer.given = [ids[mask.bool()].tolist() for ids, mask in rows]
        raise StopConstruction

    module: ModuleType = import_module(name)
    kind = "GRPO" if "grpo" in name else "RLOO"
    model = tiny_causal_lm(vocabulary=64).train(training)
    model.generate = generate
    known = {"processing_class": words() if tokenizer is None else tokenizer, "generation_config": None}
    known |= {"_tokenizer": known["processing_class"], "image_token": None, "pad_token": "<pad>"}
    known |= dict.fromkeys(("image_token_id", "vision_start_token_id", "vision_end_token_id"))
    # 0.14 and 0.15 ask the arguments.
    args = default_arguments(getattr(module, f"{kind}Config"), use_vllm=attributes.get("use_vllm", False))
    trainer = stub_that_generates(getattr(module, f"{kind}Trainer"), args, model, **{**known, **attributes})
    trainer.module, trainer.target = module, TARGETS[name].attribute.partition(".")[2]
    return trainer


def given(trainer: Any, prompts: Any, **columns: Any) -> list[list[int]]:
    """Return the prompts that the model or vLLM is given, for rows with these columns."""
    trainer.given = None
    method = getattr(trainer, trainer.target)
    rows = [{"prompt": prompt, **columns} for prompt in prompts]
    known = {"inputs": rows, "model": trainer.model, "prompts": list(prompts), "images": None}
    parameters = inspect.signature(method).parameters
    with single_process(trainer.module), suppress(StopConstruction):
        method(**{key: value for key, value in known.items() if key in parameters})
    rows_given: list[list[int]] = trainer.given
    return rows_given


@each_trainer
@pytest.mark.parametrize("training", [True, False])
def test_each_prompt_of_each_batch_begins_once(name: str, training: bool) -> None:
    trainer = stub(name, training=training)
    tokenizer = trainer.processing_class
    assert given(trainer, PROMPTS) == ROWS
    assert given(trainer, PROMPTS[1:2]) == ROWS[1:2]
    assert given(trainer, [BEGUN[0], *PROMPTS[1:]]) == ROWS
    assert trainer.processing_class is tokenizer


@each_trainer
def test_trl_gives_no_beginning(name: str, switch: Any) -> None:
    with switch.off():
        assert given(stub(name), PROMPTS) == [row[1:] for row in ROWS]


UNAFFECTED = {
    "texts with a BOS": (words(), BEGUN),
    "messages": (words(), CHATS),
    "no BOS is added": (words("$A"), PROMPTS),
    "an end is added": (words("$A <eos>"), PROMPTS),
    "both are added": (words("w59 $A <eos>"), PROMPTS),
    "there is no BOS": (words(bos_token=None), PROMPTS),
}


@each_trainer
@pytest.mark.parametrize(("tokenizer", "prompts"), UNAFFECTED.values(), ids=list(UNAFFECTED))
def test_other_prompts_are_tokenized_as_by_trl(name: str, tokenizer: Any, prompts: Any, switch: Any) -> None:
    trainer = stub(name, tokenizer)
    patched = given(trainer, prompts)
    with switch.off():
        assert given(trainer, prompts) == patched


@each_trainer
def test_two_trainers_have_each_its_own_tokenizer(name: str) -> None:
    one, other = stub(name), stub(name, words("$A"))
    assert given(one, PROMPTS) == ROWS
    assert given(other, PROMPTS) == [row[1:] for row in ROWS]
    assert given(one, PROMPTS) == ROWS


of_rows = pytest.mark.skipif(
    not TARGETS or any(target.wrapper != "begin_the_prompts_of_the_rows" for target in TARGETS.values()),
    reason="vLLM tokenizes texts by itself, or no release here is affected",
)


@of_rows
@each_trainer
@pytest.mark.parametrize("column", ["image", "images"])
def test_prompts_with_images_stay(name: str, column: str) -> None:
    class Processor:
        tokenizer = words()

        def __call__(self, text: Any, images: Any = None, **settings: Any) -> Any:
            return self.tokenizer(text, **settings)

    trainer = stub(name, Processor())
    assert given(trainer, PROMPTS, **{column: None}) == [row[1:] for row in ROWS]


@of_rows
@each_trainer
@pytest.mark.parametrize("longest", [None, 4])
def test_vllm_is_given_texts_without_a_beginning(name: str, longest: int | None) -> None:
    texts: list[str] = []

    def generate(prompts: Any, *args: Any, **settings: Any) -> Any:
        texts.extend(prompts)
        raise StopConstruction

    engine = SimpleNamespace(generate=generate)
    settings = ("top_p", "top_k", "min_p", "repetition_penalty", "temperature", "max_completion_length")
    known: dict[str, Any] = dict.fromkeys(settings, 1)
    known |= {"use_vllm": True, "vllm_mode": "server", "vllm_client": engine, "llm": engine, "_last_loaded_step": 0}
    known |= {"num_generations": 1, "guided_decoding_regex": None, "sampling_params": None}
    given(stub(name, max_prompt_length=longest, **known), PROMPTS)
    # TRL takes the padding off, but not that with the blanks of this tokenizer.
    assert [" ".join(word for word in text.split() if word != "<pad>") for text in texts] == PROMPTS
