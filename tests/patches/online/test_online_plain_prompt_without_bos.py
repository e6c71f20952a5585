"""The model is given one BOS before each plain prompt, and every other prompt as TRL gives it."""

from __future__ import annotations

import pickle
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from trl_hotfix.authoring.plain_prompts import _beginning
from trl_hotfix.testing import default_arguments, single_process, stub_that_generates, tiny_causal_lm

import tiny

try:
    online_dpo = import_module("trl.experimental.online_dpo.online_dpo_trainer")
except ImportError:
    online_dpo = import_module("trl.trainer.online_dpo_trainer")
try:
    a2po: Any = import_module("trl.experimental.a2po.a2po_trainer")
except ImportError:
    a2po = None

BOS, EOS = 62, 1
PROMPTS = ["w1 w2 w3", "w4", "w5 w6"]
ROWS = [[BOS, 4, 5, 6], [BOS, 7], [BOS, 8, 9]]
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]

needs_a2po = pytest.mark.skipif(a2po is None, reason="this release has no A2PO")


def words(single: str = "w59 $A", bos_token: str | None = "w59", template: str = TEMPLATE) -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.bos_token, tokenizer.chat_template = "left", bos_token, template
    specials = [("w59", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


class Model:
    """A model that ends each completion at once, and keeps the prompts that it is given, without their padding."""

    def __init__(self) -> None:
        self.lm = tiny_causal_lm(vocabulary=64)
        self.lm.generate = self.generate
        self.prompts: list[list[int]] = []

    def generate(
        self, input_ids: Any, attention_mask: Any, generation_config: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.tolist() == sorted(mask.tolist()), "the padding is on the left"
            self.prompts.append(ids[mask.bool()].tolist())
        count = getattr(generation_config, "num_return_sequences", 1)
        rows = input_ids.repeat_interleave(count, 0)
        return torch.cat([rows, torch.full_like(rows[:, :1], EOS)], dim=1)


def online_trainer(tokenizer: Any, **attributes: Any) -> Any:
    model = Model()
    known: dict[str, Any] = {
        "image_token": None,
        "is_vision_model": False,
        "use_transformers_paged": False,
        "eos_token_ids": [EOS],
    }
    known |= {"generation_config": SimpleNamespace(max_tokens=4), "generation_kwargs": {}}
    known |= {"processing_class": tokenizer, "_tokenizer": tokenizer, "seen": model}
    arguments = default_arguments(online_dpo.OnlineDPOConfig)
    return stub_that_generates(online_dpo.OnlineDPOTrainer, arguments, model.lm, **{**known, **attributes})


def generated(trainer: Any, prompts: Any, images: Any = None) -> list[list[int]]:
    """Return the prompts that the trainer generates from. The loss has the same ones, each twice."""
    trainer.seen.prompts.clear()
    ids, masks, *_ = trainer._generate(trainer.model, prompts, images)
    assert [row[mask.bool()].tolist() for row, mask in zip(ids, masks, strict=True)] == trainer.seen.prompts
    assert trainer.seen.prompts[len(prompts) :] == trainer.seen.prompts[: len(prompts)]
    return trainer.seen.prompts[: len(prompts)]


def test_each_prompt_of_each_batch_begins_once() -> None:
    trainer = online_trainer(words())
    assert generated(trainer, PROMPTS) == ROWS
    assert generated(trainer, PROMPTS[1:2]) == ROWS[1:2]
    assert generated(trainer, [""]) == [[BOS]]
    trainer.model.eval()
    assert generated(trainer, PROMPTS[::-1]) == ROWS[::-1]


def test_prompts_of_which_some_have_a_bos_begin_once() -> None:
    for place in range(3):
        prompts = [f"w59 {prompt}" if row == place else prompt for row, prompt in enumerate(PROMPTS)]
        assert generated(online_trainer(words()), prompts) == ROWS


UNAFFECTED = {
    "texts with a BOS": (words(), [f"w59 {prompt}" for prompt in PROMPTS]),
    "texts with two": (words(), [f"w59 w59 {prompt}" for prompt in PROMPTS]),
    "messages": (words(), CHATS),
    "messages without a BOS": (words(template=TEMPLATE.removeprefix("w59 ")), CHATS),
    "no BOS is added": (words("$A"), PROMPTS),
    "an end is added": (words("$A <eos>"), PROMPTS),
    "both are added": (words("w59 $A <eos>"), PROMPTS),
    "a BOS is added behind": (words("$A w59"), PROMPTS),
    "another token is added": (words("<eos> $A"), PROMPTS),
    "there is no BOS": (words(bos_token=None), PROMPTS),
}
unaffected = pytest.mark.parametrize(("tokenizer", "prompts"), UNAFFECTED.values(), ids=list(UNAFFECTED))


@unaffected
def test_other_prompts_are_tokenized_as_by_trl(tokenizer: Any, prompts: Any, switch: Any) -> None:
    trainer = online_trainer(tokenizer)
    patched = generated(trainer, prompts).copy()
    with switch.off():
        assert generated(trainer, prompts) == patched


def test_blanks_of_sentencepiece_stay_as_they_are() -> None:
    """Such a tokenizer puts a blank before a text, and none behind a BOS that stands in the text."""
    tokenizer = words()
    vocabulary = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, "w1": 3, "\u2581w1": 4, "w59": BOS}
    tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.add_special_tokens({"bos_token": "w59"})
    trainer = online_trainer(tokenizer)
    assert generated(trainer, ["w1"]) == [tokenizer("w1")["input_ids"]] == [[BOS, 4]]
    assert generated(trainer, ["w59w1"]) == [[BOS, 3]]


class Processor:
    """A processor of texts, or of texts with images."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template, self.images = tokenizer, tokenizer.chat_template, []

    def __call__(self, images: Any = None, text: Any = None, **settings: Any) -> Any:
        self.images.append(images)
        return self.tokenizer(text, **settings)


def test_a_processor_begins_texts_and_leaves_those_with_images_as_they_are() -> None:
    trainer = online_trainer(words(), processing_class=Processor(words()))
    assert generated(trainer, PROMPTS) == ROWS
    assert generated(trainer, PROMPTS, ["x", "y", "z"]) == [row[1:] for row in ROWS]
    assert trainer.processing_class.images == [None, [["x"], ["y"], ["z"]]]


class Client:
    """A server of vLLM, which answers each prompt by two completions."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def generate(self, prompts: list[str], **settings: Any) -> Any:
        class Answer(list[Any]):
            def __getitem__(self, key: Any) -> Any:
                return list(self) if key == "completion_ids" else super().__getitem__(key)

        self.prompts = prompts
        return Answer([[[5], [6]] for _ in prompts])


def served(trainer: Any, prompts: Any) -> list[list[int]]:
    """Return the prompts of the loss, without padding, and without the second of each two."""
    with single_process(online_dpo):
        _, rows = trainer._generate_vllm_server(prompts)
    unpadded = [[token for token in row if token != 0] for row in rows]
    assert len(unpadded) == 2 * len(prompts)
    return sorted(unpadded[:: 2 if unpadded[0] == unpadded[1] else 1][: len(prompts)])


def server_trainer(tokenizer: Any) -> Any:
    settings = ("top_p", "top_k", "min_p", "repetition_penalty")
    known = {"vllm_client": Client(), "num_generations": 1, "temperature": 1.0, "_last_loaded_step": 0}
    return online_trainer(tokenizer, **known, **dict.fromkeys(settings, 1.0))


def test_beside_a_server_of_vllm_the_loss_has_the_bos_that_vllm_adds() -> None:
    trainer = server_trainer(words())
    assert served(trainer, PROMPTS) == sorted(ROWS)
    assert trainer.vllm_client.prompts == PROMPTS


def test_beside_a_server_of_vllm_messages_are_tokenized_as_by_trl(switch: Any) -> None:
    trainer = server_trainer(words())
    assert served(trainer, CHATS) == sorted(ROWS)
    with switch.off():
        assert served(trainer, CHATS) == sorted(ROWS)


@pytest.mark.parametrize("fails", [False, True])
def test_the_tokenizer_is_put_back(fails: bool) -> None:
    tokenizer = words()
    trainer = online_trainer(tokenizer)
    if fails:
        trainer.model.generate = lambda **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer._generate(trainer.model, PROMPTS)
    else:
        generated(trainer, PROMPTS)
    assert trainer.processing_class is tokenizer


def test_two_trainers_have_each_its_own_tokenizer() -> None:
    one, other = online_trainer(words()), online_trainer(words("$A"))
    assert generated(one, PROMPTS) == ROWS
    assert generated(other, PROMPTS) == [row[1:] for row in ROWS]
    assert generated(one, PROMPTS) == ROWS


def test_a_view_can_be_pickled() -> None:
    view = pickle.loads(pickle.dumps(_beginning(words(), "w59")))
    assert view(text=["w1"], add_special_tokens=False)["input_ids"] == [[BOS, 4]]
    assert view.pad_token_id == 0


def a2po_trainer(tokenizer: Any, prompts: Any = PROMPTS, evaluated: Any = None, **settings: Any) -> Any:
    model, reference, rewarded = Model(), Model(), list[Any]()

    def reward(prompts: Any, **kwargs: Any) -> list[float]:
        rewarded.extend(prompts)
        return [1.0] * len(prompts)

    arguments = default_arguments(
        a2po.A2POConfig, **{"num_value_samples": 2, "per_device_train_batch_size": 2} | settings
    )
    known = {"processing_class": tokenizer, "ref_model": reference.lm, "seen": model, "reference": reference}
    known |= {"eos_token_ids": [EOS], "_optimal_values": None, "model_kwarg_keys": (), "rewarded": rewarded}
    known |= {"reward_funcs": [reward], "reward_weights": torch.ones(1), "generation_config": None}
    known |= {"_metrics": {mode: defaultdict(list) for mode in ("train", "eval")}}
    known |= {"value_generation_config": SimpleNamespace(num_return_sequences=2)}
    known |= {"train_dataset": rows_of(prompts), "eval_dataset": None if evaluated is None else rows_of(evaluated)}
    trainer = stub_that_generates(a2po.A2POTrainer, arguments, model.lm, **known)
    trainer.accelerator.prepare = lambda loader: loader
    return trainer


def rows_of(prompts: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def estimated(trainer: Any) -> list[list[int]]:
    """Return the prompts that the reference generates from."""
    trainer.reference.prompts.clear()
    with single_process(a2po):
        trainer._estimate_optimal_values()
    return trainer.reference.prompts


def step(trainer: Any, prompts: Any) -> list[list[int]]:
    """Return the prompts that the policy generates from, which the loss has too."""
    trainer.seen.prompts.clear()
    with single_process(a2po):
        batch = trainer._prepare_inputs([{"prompt": prompt} for prompt in prompts])
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    assert [ids[mask.bool()].tolist()[:-1] for ids, mask in rows] == trainer.seen.prompts
    return trainer.seen.prompts


@needs_a2po
def test_a2po_values_and_steps_have_a_bos_and_all_else_the_prompts_as_they_are() -> None:
    trainer = a2po_trainer(words())
    assert estimated(trainer) == ROWS
    assert list(trainer._optimal_values) == PROMPTS
    assert step(trainer, PROMPTS) == ROWS
    assert step(trainer, PROMPTS[1:]) == ROWS[1:]
    trainer.model.eval()
    assert step(trainer, PROMPTS[:1]) == ROWS[:1]
    assert trainer.rewarded == [prompt for prompt in PROMPTS for _ in range(2)] + PROMPTS + PROMPTS[1:] + PROMPTS[:1]


@needs_a2po
def test_a2po_values_that_a_step_estimates_begin_once() -> None:
    tokenizer = words()
    trainer = a2po_trainer(tokenizer, evaluated=["w7"])
    trainer.model.eval()
    assert step(trainer, PROMPTS) == ROWS
    assert trainer.reference.prompts == [*ROWS, [BOS, 10]]
    assert trainer.processing_class is tokenizer


@needs_a2po
def test_a2po_prompts_begin_once_wherever_one_lacks_a_bos() -> None:
    begun = [f"w59 {prompt}" for prompt in PROMPTS]
    assert estimated(a2po_trainer(words(), begun, evaluated=["w7"])) == [*ROWS, [BOS, 10]]
    assert estimated(a2po_trainer(words(), [*begun[:2], PROMPTS[2]])) == ROWS
    trainer = a2po_trainer(words(), begun)
    trainer._optimal_values = defaultdict(float)
    assert step(trainer, [begun[0], *PROMPTS[1:]]) == ROWS


@needs_a2po
def test_a2po_counts_the_bos_in_the_length_of_a_prompt() -> None:
    trainer = a2po_trainer(words(), max_prompt_length=2)
    short = [row[:2] for row in ROWS]
    assert estimated(trainer) == short
    assert step(trainer, PROMPTS) == short


@needs_a2po
@unaffected
def test_a2po_tokenizes_other_prompts_as_trl(tokenizer: Any, prompts: Any, switch: Any) -> None:
    trainer = a2po_trainer(tokenizer, prompts)
    patched = estimated(trainer).copy(), step(trainer, prompts).copy()
    with switch.off():
        assert (estimated(trainer), step(trainer, prompts)) == patched


@needs_a2po
def test_a2po_drops_the_prompts_that_are_never_answered_well() -> None:
    trainer = a2po_trainer(words())
    trainer.reward_funcs = [lambda prompts, **kwargs: [float(prompt != "w4") for prompt in prompts]]
    estimated(trainer)
    assert [row["prompt"] for row in trainer.train_dataset] == ["w1 w2 w3", "w5 w6"]
