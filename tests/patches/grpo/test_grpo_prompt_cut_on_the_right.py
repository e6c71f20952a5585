"""A prompt that is too long loses its beginning, in the ids to sample from and in those of the loss."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.patches.grpo.grpo_prefilled_assistant_turn_closed import continue_the_assistant
from trl_hotfix.patches.grpo.grpo_prompt_cut_on_the_right import keep_the_end
from trl_hotfix.testing import (
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
    trainer_and_config,
)

import tiny

ID = "grpo-prompt-cut-on-the-right"
PROMPTS = ["2 3 4 5 6", "7 8", "3 5 7 9"]

Ids = list[list[int]]

each_method = pytest.mark.parametrize("method", ["GRPO", "RLOO"])
each_kind = pytest.mark.parametrize("kind", ["texts", "messages"])


def ids_of(prompts: list[str], kept: slice = slice(None)) -> Ids:
    return [[int(word) for word in prompt.split()][kept] for prompt in prompts]


def tokenizer_of_digits(side: str = "right", longest: int | None = None) -> Any:
    """Return a tokenizer of transformers' own, whose tokens are digits, and whose template is the text itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"model_max_length": longest} if longest else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="0", eos_token="1", truncation_side=side, padding_side="left", **settings
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


class Case:
    """A trainer with a limit. ``sampled`` has the ids that its model is to complete, and ``seen`` the tokenizer."""

    def __init__(
        self, method: str, limit: int | None = 3, *, tokenizer: Any = None, paged: bool = False, **attributes: Any
    ) -> None:
        self.module = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
        trainer_class, config_class = trainer_and_config(self.module, method)
        names = inspect.unwrap(trainer_class._generate_single_turn).__code__.co_names
        if "max_prompt_length" not in names:
            pytest.skip("in this release max_prompt_length cuts nothing")
        self.parameters = inspect.signature(trainer_class._generate_single_turn).parameters
        if paged and "images" in self.parameters:
            pytest.skip("0.24.0 cuts nothing with use_transformers_paged")
        self.tokenizer = tokenizer_of_digits() if tokenizer is None else tokenizer
        self.sampled: list[Ids] = []
        self.seen: list[Any] = []
        model = tiny_causal_lm()
        model.generate, model.generate_batch = self._generate, self._generate_batch
        settings: dict[str, Any] = {"generation_config": None, "generation_kwargs": {}, "_is_vlm": False}
        settings |= {"processing_class": self.tokenizer, "max_prompt_length": limit, "use_transformers_paged": paged}
        self.trainer = stub_that_generates(
            trainer_class, default_arguments(config_class), model, **{**settings, **attributes}
        )
        self.target = f"{self.module.__name__}:{method}Trainer._generate_single_turn"

    def _generate(self, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        self.sampled.append([row[kept.bool()].tolist() for row, kept in rows])
        # Nothing is left of the columns that only the beginnings had.
        assert input_ids.shape == attention_mask.shape == (len(input_ids), max(map(len, self.sampled[-1])))
        assert attention_mask[:, -1].all()
        self.seen.append(self.trainer.processing_class)
        return torch.cat([input_ids, torch.ones_like(input_ids)], dim=1)

    def _generate_batch(self, prompts: Ids, **kwargs: Any) -> Any:
        self.sampled.append(prompts)
        self.seen.append(self.trainer.processing_class)
        return {row: SimpleNamespace(generated_tokens=[1]) for row in range(len(prompts))}

    def ids(self, prompts: list[str] = PROMPTS, kind: str = "texts", *, training: bool = True) -> Ids:
        """Return the ids of the loss, which must be those that the model is to complete."""
        self.trainer.model.train(training)
        given: list[Any] = prompts
        if kind == "messages":
            given = [[{"role": "user", "content": prompt}] for prompt in prompts]
        with single_process(self.module):
            ids: Ids
            ids, *_ = self.trainer._generate_single_turn(given, *[None] * ("images" in self.parameters))
        if not self.trainer.use_vllm:
            assert self.sampled[-1] == ids
        return ids

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


@each_method
@each_kind
@pytest.mark.parametrize("paged", [False, True], ids=["generate", "generate_batch"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_prompts_keep_their_end(method: str, kind: str, paged: bool, training: bool, limit: int) -> None:
    case = Case(method, limit, paged=paged)
    assert case.ids(kind=kind, training=training) == ids_of(PROMPTS, slice(-limit, None))
    assert case.acts == 1


@each_method
@each_kind
@pytest.mark.parametrize("paged", [False, True], ids=["generate", "generate_batch"])
def test_trl_keeps_their_beginning(method: str, kind: str, paged: bool, switch: Any) -> None:
    case = Case(method, paged=paged)
    with switch.off():
        assert case.ids(kind=kind) == ids_of(PROMPTS, slice(3))


@each_method
def test_each_batch_of_each_trainer_has_its_own_limit(method: str) -> None:
    first, second = Case(method, 3), Case(method, 2)
    for prompts in (PROMPTS, ["9 8 7 6", "5 4 3"], ["2"]):
        assert first.ids(prompts) == ids_of(prompts, slice(-3, None))
        assert second.ids(prompts) == ids_of(prompts, slice(-2, None))
    assert first.acts == second.acts == 2


@each_method
def test_without_a_limit_that_of_the_tokenizer_is_kept(method: str) -> None:
    case = Case(method, None, tokenizer=tokenizer_of_digits(longest=4))
    assert case.ids() == ids_of(PROMPTS, slice(-4, None))
    assert case.acts == 1


@each_method
@each_kind
@pytest.mark.parametrize("limit", [5, 6, 512, None])
def test_prompts_that_fit_are_left_alone(method: str, kind: str, limit: int | None) -> None:
    case = Case(method, limit)
    assert case.ids(kind=kind) == ids_of(PROMPTS)
    assert case.acts == 0


@each_method
@each_kind
def test_a_tokenizer_that_cuts_on_the_left_is_given_to_trl_as_it_is(method: str, kind: str) -> None:
    case = Case(method, tokenizer=tokenizer_of_digits("left"))
    assert case.ids(kind=kind) == ids_of(PROMPTS, slice(-3, None))
    # A view is equal to what it is a view of.
    assert case.seen[0] is case.tokenizer
    assert case.acts == 0


class Processor:
    """A processor, which has no side of its own."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer_of_digits()

    def __call__(self, **kwargs: Any) -> Any:
        return self.tokenizer(**kwargs)


@each_method
def test_a_processor_is_given_to_trl_as_it_is(method: str) -> None:
    case = Case(method, tokenizer=Processor())
    assert case.ids() == ids_of(PROMPTS, slice(3))
    assert case.seen[0] is case.tokenizer
    assert case.acts == 0


@each_method
def test_the_tokenizer_of_the_user_stays_as_it_is(method: str) -> None:
    case = Case(method)
    case.ids()
    assert case.trainer.processing_class is case.tokenizer
    assert case.tokenizer.truncation_side == "right"
    assert case.tokenizer(PROMPTS, truncation=True, max_length=2)["input_ids"] == ids_of(PROMPTS, slice(2))


@each_method
def test_the_trainer_has_its_tokenizer_after_an_error(method: str, switch: Any) -> None:
    def fail(**kwargs: Any) -> None:
        raise ArithmeticError

    case = Case(method)
    case.trainer.model.generate = fail
    with switch.on(), pytest.raises(ArithmeticError):
        case.ids()
    assert case.trainer.processing_class is case.tokenizer


def tokenised(prompts: list[Any], *wrappers: Any, **settings: Any) -> Any:
    """Return what a trainer with a limit of 3 gets from its tokenizer within these wrappers, the outermost first."""
    tokenizer = tokenizer_of_digits()
    tokenizer.chat_template = (
        "{% for message in messages %}8 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}9{% endif %}"
    )
    trainer = SimpleNamespace(processing_class=tokenizer, use_vllm=False)
    keywords = {"max_length": 3, "truncation": True, "add_special_tokens": False, **settings}

    def method(prompts: list[Any]) -> Any:
        if isinstance(prompts[0], str):
            return trainer.processing_class(text=prompts, **keywords)
        of_messages = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return trainer.processing_class.apply_chat_template(conversation=prompts, **keywords, **of_messages)

    def within(wrapper: Any, inner: Any) -> Any:
        return lambda prompts: wrapper(Call(inner, trainer, (prompts,)))

    for wrapper in reversed(wrappers):
        method = within(wrapper, method)
    return method(prompts)


@pytest.mark.parametrize("order", [1, -1], ids=["cut without", "cut within"])
def test_messages_that_another_patch_leaves_open_are_cut_too(order: int) -> None:
    answer = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "3 4 5"}]
    prompts = [answer, [{"role": "user", "content": "5"}]]
    wrappers = [keep_the_end, continue_the_assistant][::order]
    encoded = tokenised(prompts, *wrappers, return_tensors="pt", padding=True)
    assert encoded["input_ids"].tolist() == [[3, 4, 5], [8, 5, 9]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_rows_without_padding_keep_their_masks() -> None:
    encoded = tokenised(PROMPTS, keep_the_end)
    assert encoded["input_ids"] == encoded.input_ids == ids_of(PROMPTS, slice(-3, None))
    assert encoded["attention_mask"] == [[1] * len(ids) for ids in encoded["input_ids"]]


def test_a_call_that_asks_for_no_truncation_gets_none() -> None:
    assert tokenised(PROMPTS, keep_the_end, truncation=False)["input_ids"] == ids_of(PROMPTS)


@each_method
def test_vllm_cuts_the_prompts_itself(method: str) -> None:
    class Client:
        """It keeps the arguments that it is given."""

        def generate(self, truncate_prompt_tokens: int, **kwargs: Any) -> dict[str, Any]:
            case.seen.append(case.trainer.processing_class)
            self.limit = truncate_prompt_tokens
            return {"prompt_ids": [[2]], "completion_ids": [[1]], "logprobs": [[0.0]]}

        chat = generate

    client = Client()
    of_vllm: dict[str, Any] = {"vllm_client": client, "vllm_mode": "server", "_last_loaded_step": 0}
    of_vllm |= {"guided_decoding_regex": None}
    case = Case(method, use_vllm=True, num_generations=1, num_generations_eval=1, **of_vllm)
    case.ids(["2 3 4 5 6"], "messages")
    assert client.limit == 3
    assert case.seen[0] is case.tokenizer
    assert case.acts == 0
