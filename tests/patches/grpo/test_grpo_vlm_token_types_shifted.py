"""A prompt with images is tokenized for its types as it is for its generation, by GRPO, RLOO and Distillation."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch

from trl_hotfix.testing import (
    PromptTokenizer,
    default_arguments,
    messages,
    metrics_by_mode,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
)

import tiny

ID, IMAGE = "grpo-vlm-token-types-shifted", 4
PROMPTS = ([3, IMAGE, 5], [IMAGE], [3, 5, IMAGE, IMAGE, 5], [3, 3])
"""The tokens of four prompts."""


class Processor(PromptTokenizer):
    """A processor that pads on the right, and adds its BOS, 2, unless it is asked for something else."""

    bos_token: str | None = "\2"

    def __init__(self, named: Sequence[str] = ("token_type_ids",), writes: str = "\2") -> None:
        self.model_input_names = ("input_ids", *named)
        self.writes, self.given = writes, []  # type: ignore[var-annotated]

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        if not tokenize:
            return f"{self.writes}{conversation[0]['content'][-1]['text']}"
        texts = [f"{self.writes}{each[0]['content'][-1]['text']}" for each in conversation]
        # Templates that write no BOS leave it to the tokenizer.
        side: dict[str, Any] = {
            "padding_side": "left",
            "add_special_tokens": not self.writes,
            "padding": "return_tensors" in kwargs,
        }
        batch = self._tokens(texts, **side)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def __call__(self, text: Any = None, return_tensors: str | None = None, images: Any = None, **kwargs: Any) -> Any:
        self.given.append((images is not None, {name: kwargs[name] for name in SIDES if name in kwargs}))
        return {**self._tokens(text, **{**kwargs, "padding": True}), "pixel_values": torch.ones(len(text), 1)}

    def _tokens(
        self, texts: Any, padding_side: str = "right", add_special_tokens: bool = True, padding: Any = True, **_: Any
    ) -> Any:
        rows = [[2] * add_special_tokens + PROMPTS[int(text.removeprefix("\2"))] for text in texts]
        if not padding:
            return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        longest = max(map(len, rows))
        fillers = [[0] * (longest - len(row)) for row in rows]
        pairs = list(zip(rows, fillers, strict=True))
        ids = torch.tensor([filler + row if padding_side == "left" else row + filler for row, filler in pairs])
        types = dict.fromkeys(set(self.model_input_names) & TYPES, (ids == IMAGE).long())
        return {"input_ids": ids, "attention_mask": ids.clamp(max=1), **types}


TYPES = {"token_type_ids", "mm_token_type_ids"}
SIDES = ("padding_side", "add_special_tokens")
NAMES = {"GRPO": "grpo", "RLOO": "rloo", "Distillation": "distillation"}


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    module = importlib.import_module(f"trl.trainer.{NAMES[request.param]}_trainer") if _exists(request.param) else None
    if module is None:
        pytest.skip("Distillation of this release takes no images")
    return module


def _exists(name: str) -> bool:
    return name != "Distillation" or importlib.util.find_spec("trl.trainer.distillation_trainer") is not None


def made(module: ModuleType, processor: Any, training: bool = True) -> Any:
    """Return a trainer that completes each prompt by one token, an end."""
    completions = [[1]] * len(PROMPTS)
    if not hasattr(module, "DistillationTrainer"):
        trainer = stub_that_scores(module, completions, [1.0, 0.0, 2.0, 0.0], training=training)
    else:
        model = tiny_causal_lm()
        model.train(training)
        model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, torch.tensor(completions)], dim=1)
        attributes = {"generation_config": None, "generation_kwargs": {}, "_metrics": metrics_by_mode()}
        attributes |= {"eos_token_ids": [1], "_is_vlm": False, "_total_train_tokens": 0}
        args = default_arguments(module.DistillationConfig)
        trainer = stub_that_generates(module.DistillationTrainer, args, model, **attributes)
    trainer.processing_class = trainer._tokenizer = processor
    return trainer


def output_of(trainer: Any, module: ModuleType, **columns: Any) -> Any:
    columns = columns or {"image": 7}
    rows = [{"prompt": messages(f"u{row}"), **columns} for row in range(len(PROMPTS))]
    with single_process(module):
        return trainer._generate_and_score_completions(rows)


def _trainer(module: ModuleType) -> str:
    return next(name for name in NAMES if hasattr(module, f"{name}Trainer"))


def _method(module: ModuleType) -> Any:
    return getattr(module, f"{_trainer(module)}Trainer")._generate_and_score_completions


def acts(trainer: Any, module: ModuleType) -> int:
    name = _trainer(module)
    return tiny.acts(ID, f"{module.__name__}:{name}Trainer._generate_and_score_completions", trainer) or 0


def assert_right(output: Any, name: str = "token_type_ids") -> None:
    prompts, types = output["prompt_ids"], output[name]
    assert types.shape == (4, prompts.shape[1] + output["completion_ids"].shape[1])
    assert types[:, : prompts.shape[1]].equal((prompts == IMAGE).long())


@pytest.mark.parametrize("columns", [{"image": 7}, {"images": [7]}], ids=["image", "images"])
@pytest.mark.parametrize("training", [True, False])
def test_the_types_of_each_batch_are_those_of_its_prompts(
    module: ModuleType, columns: dict[str, Any], training: bool
) -> None:
    processor = Processor()
    trainer = made(module, processor, training)
    for number in (1, 2):
        assert_right(output_of(trainer, module, **columns))
        assert acts(trainer, module) == number
    assert trainer.processing_class is processor
    assert processor.given[-1] == (True, {"padding_side": "left", "add_special_tokens": False})


def test_trl_has_those_of_another_tokenization(module: ModuleType, switch: Any) -> None:
    trainer = made(module, Processor())
    with switch.off():
        types = output_of(trainer, module)["token_type_ids"]
    assert types[0].nonzero().flatten().tolist() == [2]
    assert types[1].nonzero().flatten().tolist() == [1]


def test_a_beginning_that_the_template_does_not_write_is_added_as_in_the_generation(module: ModuleType) -> None:
    if importlib.metadata.version("trl") == "0.24.0":
        pytest.skip("0.24.0 adds no beginning in the generation")
    processor = Processor(writes="")
    assert_right(output_of(made(module, processor), module))
    assert processor.given[-1] == (True, {"padding_side": "left"})


def test_a_tokenizer_may_have_no_beginning(module: ModuleType) -> None:
    processor = Processor(writes="")
    processor.bos_token = None
    with suppress(RuntimeError, ValueError):  # In 0.24.0 this processor is inconsistent.
        output_of(made(module, processor), module)
    assert (True, {"padding_side": "left"}) in processor.given


def test_the_first_text_says_whether_the_template_writes_the_beginning(module: ModuleType) -> None:
    class First(Processor):
        def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
            text = super().apply_chat_template(conversation, tokenize, **kwargs)
            return text if tokenize or text == "\0020" else text.removeprefix("\2")

    processor = First()
    output_of(made(module, processor), module)
    assert processor.given[-1] == (True, {"padding_side": "left", "add_special_tokens": False})


def test_texts_without_images_are_tokenized_as_by_trl(module: ModuleType) -> None:
    processor = Processor()
    trainer = made(module, processor)
    generate = trainer._generate

    def generate_and_tokenize(*args: Any, **kwargs: Any) -> Any:
        trainer.processing_class(text=["\0020"])
        return generate(*args, **kwargs)

    trainer._generate = generate_and_tokenize
    output_of(trainer, module)
    assert (False, {}) in processor.given


@pytest.mark.parametrize("named", [(), ("pixel_values",)], ids=str)
def test_a_processor_without_types_is_called_as_by_trl(module: ModuleType, named: tuple[str, ...]) -> None:
    processor = Processor(named)
    trainer = made(module, processor)
    output_of(trainer, module)
    assert processor.given[-1][1].keys() <= {"padding_side", "add_special_tokens"}
    assert acts(trainer, module) == 0


def test_the_types_of_qwen_are_padded_too(module: ModuleType) -> None:
    if "mm_token_type_ids" not in inspect.getsource(inspect.unwrap(_method(module))):
        pytest.skip("this release passes no such types on")
    processor = Processor(("mm_token_type_ids",))
    assert_right(output_of(made(module, processor), module), "mm_token_type_ids")


@pytest.mark.parametrize("columns", [{"image": None}, {"images": []}], ids=["image", "images"])
def test_prompts_without_images_are_not_touched(module: ModuleType, columns: dict[str, Any]) -> None:
    trainer = made(module, Processor())
    # Not every release takes such rows; the wrapper has been called by then.
    with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
        output_of(trainer, module, **columns)
    assert acts(trainer, module) == 0
