"""A completion starts where its tokens leave those of the prompt, in each dataset of SFT, DPO and KTO."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.authoring import module_of
from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    recorded_warnings,
    single_process,
    stream,
    stub_trainer,
)

import tiny

ID, TARGET = "completion-start-prefix-mismatch", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

PAIRS = (
    ("ab", "cd", "a"),
    ("vwxab", "cd", "vwxa"),
    ("vwxyz", "d", "vwxyz"),
    ("xy", "zd", "xy"),
    # This prompt begins with the one before.
    ("xyzab", "cd", "xyza"),
    # Where the very first token differs, the prompt is not cut.
    ("b", "cd", "b"),
)
"""Prompts, completions, and what is left of each prompt if ``bc`` is one token."""
PREFIXES = (PAIRS[2], PAIRS[3])

Row = dict[str, Any]


class MergingTokenizer(CharacterTokenizer):
    """Make one token of ``bc``, and of an end of sequence with ``c``. Its generation prompt has a ``~`` too many."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("bc", "\2").replace("\1c", "\3"), **kwargs)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt)
        return rendered + "~" if add_generation_prompt else rendered


class Processor(MergingTokenizer):
    """A processor, which returns a batch of one for a text."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return {"input_ids": [super().__call__(text)["input_ids"]]}


@pytest.fixture(params=["SFT", "DPO", "KTO"])
def method(request: pytest.FixtureRequest) -> Any:
    trainer_class, _ = tiny.classes(request.param)
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters or hasattr(trainer_class, "tokenize_row"):
        pytest.skip("in this release completions are tokenised by themselves")
    return request.param


def trainer_of(method: str, tokenizer: Any) -> Any:
    trainer_class, config_class = tiny.classes(method)
    known = {"completion_only_loss": True, "chat_template": None, "calculate_KL": False, "_is_vlm": False}
    settings = default_arguments(config_class, max_length=None, shuffle_dataset=False)
    return stub_trainer(trainer_class, settings, _tokenizer=tokenizer, **known)


def prepared(trainer: Any, dataset: Any, *, formatting_func: Any = None, name: str = "train") -> Any:
    """Return ``dataset``, or a stream of these rows, as the trainer prepares it with its tokenizer."""
    prepare = trainer._prepare_dataset
    options = {"packing": False, "formatting_func": formatting_func, "dataset_name": name}
    taken = inspect.signature(prepare).parameters
    with single_process(module_of(prepare)):
        made = prepare(
            stream(dataset) if isinstance(dataset, list) else dataset,
            trainer._tokenizer,
            trainer.args,
            **{name: value for name, value in options.items() if name in taken},
        )
        # A stream is prepared while it is read.
        return list(made) if isinstance(dataset, list) else made


def rows_of(method: str, pairs: Any = PAIRS) -> list[Row]:
    """Return rows of the method's format. In every other preference the rejected completion is the one that merges."""
    rows: list[Row] = []
    for number, (prompt, completion, *_) in enumerate(pairs):
        chosen, rejected = (completion, "yd") if number % 2 == 0 else ("yd", completion)
        answers = {"chosen": chosen, "rejected": rejected}
        rows.append({"prompt": prompt} | (answers if method == "DPO" else {"completion": completion, "label": True}))
    return rows


def trained(row: Row) -> list[list[int]]:
    """Return the trained tokens of each completion in a prepared row; in DPO and KTO those of the prompt, too."""
    if "completion_mask" in row:
        return [list(itertools.compress(row["input_ids"], row["completion_mask"]))]
    if "labels" in row:
        return [[label for label in row["labels"] if label != -100]]
    return [row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids", "prompt_ids") if name in row]


def expected(row: Row, length: int) -> list[list[int]]:
    """Return what is trained of a row if its prompt has ``length`` tokens."""
    ids = [
        MergingTokenizer()(f"{row['prompt']}{row[name]}\1")["input_ids"][length:]
        for name in ("chosen", "rejected", "completion")
        if name in row
    ]
    return [*ids, MergingTokenizer()(row["prompt"])["input_ids"][:length]]


def right(method: str, rows: list[Row], lengths: list[int]) -> list[list[list[int]]]:
    pieces = [expected(row, length) for row, length in zip(rows, lengths, strict=True)]
    return [piece[:1] for piece in pieces] if method == "SFT" else pieces


LENGTHS = [len(left) for _, _, left in PAIRS]


def test_each_completion_is_whole_in_training_and_in_evaluation(method: str) -> None:
    rows, trainer = rows_of(method), trainer_of(method, MergingTokenizer())
    for name, start in (("train", 0), ("eval", 4), ("eval", 1)):
        found = prepared(trainer, rows[start:], name=name)
        assert [trained(row) for row in found] == right(method, rows[start:], LENGTHS[start:])


def test_trl_takes_as_many_tokens_for_the_prompt_as_it_has_alone(method: str, switch: Any) -> None:
    rows = rows_of(method)
    with switch.off():
        found = prepared(trainer_of(method, MergingTokenizer()), rows)
    assert [trained(row) for row in found] == right(method, rows, [len(prompt) for prompt, *_ in PAIRS])


def test_rows_in_memory_are_prepared_as_a_stream_is(method: str) -> None:
    rows = rows_of(method)
    found = prepared(trainer_of(method, MergingTokenizer()), Dataset.from_list(rows))
    assert [trained(row) for row in found] == right(method, rows, LENGTHS)


def test_one_warning_for_each_dataset_names_what_the_prompt_loses(method: str) -> None:
    trainer = trainer_of(method, MergingTokenizer())
    for rows in (rows_of(method), rows_of(method, [PAIRS[4], *PAIRS])):
        with recorded_warnings() as messages:
            prepared(trainer, rows)
        (message,) = messages
        assert "goes on without 'b'" in message


def test_prompts_that_are_prefixes_stay_without_a_warning(method: str, switch: Any) -> None:
    rows = rows_of(method, PREFIXES)
    with recorded_warnings() as messages:
        found = prepared(trainer_of(method, MergingTokenizer()), rows)
    assert messages == []
    with switch.off():
        assert prepared(trainer_of(method, MergingTokenizer()), rows) == found


def test_a_prompt_whose_first_token_differs_stays_without_a_warning(method: str, switch: Any) -> None:
    rows = rows_of(method, PAIRS[-1:])
    with recorded_warnings() as messages:
        found = prepared(trainer_of(method, MergingTokenizer()), rows)
    assert messages == []
    with switch.off():
        assert prepared(trainer_of(method, MergingTokenizer()), rows) == found


def test_texts_are_not_taken_for_prompts(switch: Any) -> None:
    # The end of the first text and the second letter of the second are one token.
    rows = [{"text": "ab"}, {"text": "ab\1cd"}]
    with recorded_warnings() as messages:
        found = prepared(trainer_of("SFT", MergingTokenizer()), rows)
    assert messages == []
    with switch.off():
        assert prepared(trainer_of("SFT", MergingTokenizer()), rows) == found


def test_what_a_formatting_function_returns_is_tokenised_as_trl_does(switch: Any) -> None:
    rows = rows_of("SFT", [("ab", "cd")])
    with recorded_warnings() as messages:
        found = prepared(trainer_of("SFT", MergingTokenizer()), rows, formatting_func=lambda row: row["prompt"])
    assert messages == []
    with switch.off():
        trainer = trainer_of("SFT", MergingTokenizer())
        assert prepared(trainer, rows, formatting_func=lambda row: row["prompt"]) == found


def test_conversations_lose_what_their_generation_prompt_has_too_many(method: str) -> None:
    prepare = tiny.classes(method)[0]._prepare_dataset
    if "add_generation_prompt" not in inspect.getsource(inspect.unwrap(prepare)):
        pytest.skip("before 0.24 SFT renders the prompt without the generation prompt, or its text must be a prefix")
    answers = ("chosen", "rejected") if method == "DPO" else ("completion",)
    row: Row = {name: [{"role": "assistant", "content": "cd"}] for name in answers}
    row |= {"prompt": [{"role": "user", "content": "v"}], "label": True}
    (found,) = prepared(trainer_of(method, MergingTokenizer()), [row])
    # The whole conversation is rendered as "uv\1acd\1".
    completion, prompt = ([*map(ord, text)] for text in ("cd\1", "uv\1a"))
    assert trained(found) == [completion] * len(answers) + [prompt] * (method != "SFT")


def test_the_record_says_in_which_calls_a_prompt_was_cut() -> None:
    trainer = trainer_of("SFT", MergingTokenizer())
    prepared(trainer, rows_of("SFT", PREFIXES))
    assert tiny.acts(ID, TARGET, trainer) == 0
    prepared(trainer, rows_of("SFT"))
    assert tiny.acts(ID, TARGET, trainer) == 1


def view_of(tokenizer: Any) -> Any:
    """Return what SFT gives to the function that tokenises a row, and to the processes that run it."""
    given: list[Any] = []

    def recorded(dataset: Any) -> Any:
        mapped = dataset.map

        def map_and_record(*args: Any, **kwargs: Any) -> Any:
            given.append((kwargs.get("fn_kwargs") or {}).get("processing_class"))
            return recorded(mapped(*args, **kwargs))

        dataset.map = map_and_record
        return dataset

    prepared(trainer_of("SFT", tokenizer), recorded(stream(rows_of("SFT", PREFIXES[:1]))))
    return next(value for value in given if value is not None)


def left_of(view: Any, prompt: str, text: str) -> Any:
    """Return the tokens of a prompt after those of ``text`` have been asked for."""
    ids = view(text=prompt)["input_ids"]
    view(text=text)
    return ids


@pytest.mark.parametrize(("prompt", "completion", "left"), PAIRS)
def test_a_prompt_is_cut_when_it_is_tokenised_with_its_completion(prompt: str, completion: str, left: str) -> None:
    view = view_of(MergingTokenizer())
    for _ in range(2):
        assert left_of(view, prompt, prompt + completion) == [*map(ord, left)]


def test_a_text_that_does_not_begin_with_the_prompt_is_the_next_prompt() -> None:
    view = view_of(MergingTokenizer())
    first, second = (view(text=text)["input_ids"] for text in ("x", "ab"))
    view(text="abcd")
    assert (first, second) == ([ord("x")], [ord("a")])


def test_a_processors_batch_of_one_is_cut() -> None:
    assert left_of(view_of(Processor()), "wab", "wabcd") == [[*map(ord, "wa")]]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))], ids=["of a stream", "of a worker"]
)
def test_a_copy_cuts_prompts_too(copied: Any) -> None:
    view = view_of(MergingTokenizer())
    other = copied(view)
    assert other.__wrapped__ is not view.__wrapped__
    assert left_of(other, "ab", "abcd") == [ord("a")]


def test_templates_that_are_only_rendered_are_no_prompts() -> None:
    view = view_of(MergingTokenizer())
    conversation = [{"role": "user", "content": "v"}]
    answered = [*conversation, {"role": "assistant", "content": "cd"}]
    assert view.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == "uv\1a~"
    ids = view.apply_chat_template(conversation, add_generation_prompt=True)
    assert view.apply_chat_template(answered, tokenize=False) == "uv\1acd\1"
    whole = view.apply_chat_template(answered, return_dict=True)["input_ids"]
    assert (ids, whole) == ([*map(ord, "uv\1a")], [*map(ord, "uv\1acd\1")])
