"""The chat template is given tool calls and tools without the nulls that Arrow adds, and the nulls of the user's."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
import tokenizers
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from trl.trainer import sft_trainer

from trl_hotfix.call import Call
from trl_hotfix.patches.data.tool_calls_filled_with_nulls import _without_nulls, drop_what_arrow_adds
from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    single_process,
    stub_trainer,
    trainer_and_config,
)

import tiny

ID = "tool-calls-filled-with-nulls"
MODULES = {
    "SFT": ("trl.trainer.sft_trainer",),
    "DPO": ("trl.trainer.dpo_trainer",),
    "Reward": ("trl.trainer.reward_trainer",),
    "KTO": ("trl.trainer.kto_trainer", "trl.experimental.kto.kto_trainer"),
    "TPO": ("trl.experimental.tpo.tpo_trainer",),
    "GOLD": ("trl.experimental.gold.gold_trainer",),
}
COLUMNS = {
    "SFT": ("messages",),
    "DPO": ("prompt", "chosen", "rejected"),
    "Reward": ("chosen", "rejected"),
    "KTO": ("prompt", "completion"),
    "TPO": ("prompt", "chosen", "rejected", "reference"),
    "GOLD": ("prompt", "completion"),
}

Row = dict[str, Any]


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


class Tokenizer(CharacterTokenizer):
    """Keeps what its chat template is given."""

    backend_tokenizer = byte_level()
    """GOLD asks it for offsets, and takes no other kind."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.tools: list[Any] = []

    def __call__(self, text: Any = None, **kwargs: Any) -> Any:
        encoded = super().__call__(text)
        encoded["offset_mapping"] = [(place, place + 1) for place in range(len(text))]
        return encoded

    def apply_chat_template(self, conversation: Any, *args: Any, tools: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.messages.extend(conversation)
        self.tools.append(tools)
        return super().apply_chat_template(conversation, *args, **kwargs)

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        texts = [{**message, "content": message["content"] or ""} for message in messages]
        return super().render(texts, add_generation_prompt=add_generation_prompt)

    @property
    def calls(self) -> list[Any]:
        return each_once(call for message in self.messages for call in message.get("tool_calls") or [])


def each_once(values: Iterable[Any]) -> list[Any]:
    """Return the values without repetitions: TRL prepares some rows of a stream more than once."""
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def call(**arguments: Any) -> Row:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def said(*calls: Row, content: str | None = "b") -> list[Row]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


def tool(**properties: Any) -> Row:
    return {"name": "f", "parameters": {"properties": properties, "required": list(properties)}}


WITHOUT_CALLS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CITY, DAY = call(city="P"), call(day="M")
NESTED = call(places=[{"x": "1"}, None, {"y": "2"}], area={"z": {"u": "3"}})
WITH_NULLS = call(city="P", day=None), call(city=None, day="M")


def module_of(name: str) -> ModuleType:
    """Return the module in which this release has a method that prepares a dataset. Without one the test skips."""
    for path in MODULES[name]:
        try:
            module = import_module(path)
            trainer_class, _ = trainer_and_config(module, name)
        except (ImportError, LookupError):
            continue
        prepare = inspect.unwrap(getattr(trainer_class, "_prepare_dataset", print))
        if prepare.__module__ == path and "dataset_name" in inspect.signature(prepare).parameters:
            return module
    pytest.skip(f"{name} of this release prepares its rows elsewhere")


class Prepared:
    """What the chat template was given of rows that TRL has prepared."""

    def __init__(self, name: str, dataset: Any, *, function: Any = None) -> None:
        module = module_of(name)
        trainer_class, config_class = trainer_and_config(module, name)
        method = inspect.unwrap(trainer_class._prepare_dataset)
        # SFT of 0.15 asks for the columns of a stream, which has none that it knows.
        takes_streams = "writer_batch_size" not in method.__code__.co_consts and not version("trl").startswith("0.15.")
        if isinstance(dataset, IterableDataset) and not takes_streams:
            pytest.skip(f"{name} of this release takes no streams")
        args = default_arguments(config_class, max_length=None, max_seq_length=None, shuffle_dataset=False)
        self.tokenizer = Tokenizer()
        attributes = {"chat_template": None, "_is_vlm": False, "_tokenizer": self.tokenizer, "is_vision_model": False}
        of_gold = {"use_uld_loss": False, "teacher_tokenizer": None, "_is_vision_dataset": False}
        args.use_extended_uld = args.completion_only_loss = args.calculate_KL = False
        trainer = stub_trainer(trainer_class, args, **attributes, **of_gold)
        known = {"packing": False, "formatting_func": function}
        taken = inspect.signature(method).parameters
        options = {option: value for option, value in known.items() if option in taken}
        with single_process(module):
            self.rows = list(trainer._prepare_dataset(dataset, self.tokenizer, args, dataset_name="train", **options))
        self.acts = tiny.acts(ID, f"{module.__name__}:{trainer_class.__name__}._prepare_dataset", trainer)

    @property
    def calls(self) -> list[Any]:
        return self.tokenizer.calls


def rows_of(name: str, *conversations: list[Row]) -> list[Row]:
    label = {"label": True} if name == "KTO" else {}
    return [
        {column: part[:1] if column == "prompt" else part[1:] for column in COLUMNS[name]} | label
        if "prompt" in COLUMNS[name]
        else dict.fromkeys(COLUMNS[name], part)
        for part in conversations
    ]


def streamed(rows: list[Row]) -> Any:
    return Dataset.from_list(rows).to_iterable_dataset()


def drops_nulls() -> bool:
    return hasattr(sft_trainer, "remove_none_values")


each_trainer = pytest.mark.parametrize("name", MODULES)
each_kind = pytest.mark.parametrize("make", [Dataset.from_list, streamed], ids=["dataset", "stream"])
hit_alone = pytest.mark.skipif(drops_nulls(), reason="SFT of this release reads datasets without nulls")
of_sft = pytest.mark.skipif(
    "dataset_name" not in inspect.signature(inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset)).parameters,
    reason="SFT of this release prepares rows of text",
)


@each_trainer
@each_kind
def test_the_arguments_of_a_call_are_its_own(name: str, make: Callable[..., Any]) -> None:
    calls = Prepared(name, make(rows_of(name, said(CITY), said(DAY, CITY)))).calls
    assert calls
    assert all(given in (CITY, DAY) for given in calls)


@each_trainer
def test_trl_renders_the_nulls(name: str, switch: Any) -> None:
    make = streamed if hasattr(module_of(name), "remove_none_values") else Dataset.from_list
    with switch.off():
        calls = Prepared(name, make(rows_of(name, said(CITY), said(DAY)))).calls
    assert calls
    assert all(given in WITH_NULLS for given in calls)


@of_sft
@each_kind
def test_nulls_in_structs_and_lists_of_arguments_are_dropped_too(make: Callable[..., Any]) -> None:
    assert Prepared("SFT", make(rows_of("SFT", said(NESTED), said(CITY)))).calls == [NESTED, CITY]


@of_sft
@hit_alone
@pytest.mark.skipif(not hasattr(datasets, "LargeList"), reason="datasets of this stack has no large lists")
def test_lists_may_be_large() -> None:
    arguments = dict.fromkeys(("city", "day"), datasets.Value("string"))
    calls = [{"type": datasets.Value("string"), "function": {"name": datasets.Value("string"), "arguments": arguments}}]
    message = {"role": datasets.Value("string"), "content": datasets.Value("string"), "tool_calls": calls}
    for lists in (
        {**message, "tool_calls": datasets.LargeList(calls[0])},
        {**message, "tool_calls": [{**calls[0], "more": datasets.LargeList({"of": datasets.Value("string")})}]},
    ):
        rows = rows_of("SFT", said(CITY), said(DAY))
        prepared = Prepared("SFT", Dataset.from_list(rows, features=datasets.Features({"messages": [lists]})))
        assert prepared.calls == [CITY, DAY]


@of_sft
@each_kind
def test_each_tool_has_its_own_parameters(make: Callable[..., Any]) -> None:
    tools = [[tool(city={"type": "s"})], [tool(day={"type": "s", "enum": ["M"]}), tool(city={"type": "i"})]]
    rows = [{"messages": said()[:1], "tools": each} for each in tools]
    given = each_once(Prepared("SFT", make(rows)).tokenizer.tools)
    if given == [None]:
        pytest.skip("SFT of this release takes no tools of a row")
    assert given == tools


@of_sft
@hit_alone
def test_a_row_may_lack_tools() -> None:
    rows = [{"messages": said()[:1], "tools": each} for each in ([tool(city={}), tool(day={"a": "b"})], None)]
    given = Prepared("SFT", Dataset.from_list(rows)).tokenizer.tools
    assert not given[1]


@of_sft
@hit_alone
def test_a_null_of_a_message_stays() -> None:
    prepared = Prepared("SFT", Dataset.from_list(rows_of("SFT", said(CITY, content=None), said(DAY))))
    assert prepared.calls == [CITY, DAY]
    user, assistant = prepared.tokenizer.messages[:2]
    assert user["tool_calls"] is None
    assert assistant["content"] is None


@of_sft
@hit_alone
def test_the_dataset_of_the_user_keeps_its_nulls() -> None:
    dataset = Dataset.from_list(rows_of("SFT", said(CITY), said(DAY)))
    before = copy.deepcopy(dataset[0])
    Prepared("SFT", dataset)
    assert dataset[0] == before


@each_trainer
@pytest.mark.parametrize(
    "conversations",
    [(WITHOUT_CALLS,), (said(CITY), said(CITY, CITY)), (said(call(text="{}")), said(call(text="1")))],
    ids=["no calls", "one shape", "texts"],
)
def test_a_dataset_without_nulls_is_prepared_as_trl_does(name: str, conversations: Any, switch: Any) -> None:
    rows = Dataset.from_list(rows_of(name, *conversations))
    prepared = Prepared(name, rows)
    assert prepared.acts == 0
    with switch.off():
        assert Prepared(name, rows).rows == prepared.rows


@of_sft
def test_a_stream_of_unknown_types_keeps_its_nulls() -> None:
    rows = rows_of("SFT", said(WITH_NULLS[0]))
    prepared = Prepared("SFT", IterableDataset.from_generator(lambda: iter(rows)))
    assert (prepared.calls, prepared.acts) == ([WITH_NULLS[0]], 0)


@of_sft
def test_a_function_of_the_users_is_given_the_nulls() -> None:
    given: list[Any] = []

    def text(row: Row) -> str:
        given.extend(row["messages"][1]["tool_calls"])
        return "a"

    prepared = Prepared("SFT", streamed(rows_of("SFT", said(CITY), said(DAY))), function=text)
    assert prepared.acts == 0
    assert given[0] == WITH_NULLS[0]


@of_sft
@pytest.mark.skipif(not drops_nulls(), reason="TRL of this release drops no nulls")
def test_a_dataset_that_trl_reads_without_nulls_is_left_to_it(switch: Any) -> None:
    rows = Dataset.from_list(rows_of("SFT", said(CITY), said(DAY)))
    prepared = Prepared("SFT", rows)
    assert (prepared.calls, prepared.acts) == ([CITY, DAY], 0)


@of_sft
@hit_alone
@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets of this stack has no Json")
def test_a_null_of_type_json_is_the_users() -> None:
    function = {"name": datasets.Value("string"), "arguments": datasets.Json(), "strict": datasets.Value("string")}
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    message["tool_calls"] = datasets.List({"type": datasets.Value("string"), "function": function})
    features = datasets.Features({"messages": datasets.List(message)})
    given = call(city="P", day=None)
    strict = {**given, "function": {**given["function"], "strict": "yes"}}
    prepared = Prepared("SFT", Dataset.from_list(rows_of("SFT", said(given), said(strict)), features=features))
    assert prepared.calls == [given, strict]


@each_trainer
def test_each_dataset_is_looked_at_by_itself(name: str) -> None:
    same, different = (rows_of(name, said(CITY), said(each)) for each in (CITY, DAY))
    for rows, acts in ((different, 1), (same, 0), (different, 1)):
        prepared = Prepared(name, Dataset.from_list(rows))
        assert all(given in (CITY, DAY) for given in prepared.calls)
        trl_is_right = hasattr(module_of(name), "remove_none_values")
        assert prepared.acts == (0 if trl_is_right else acts)


def test_the_view_has_a_key_of_its_own_and_can_be_copied() -> None:
    tokenizer = Tokenizer()
    calls = [{"function": {"arguments": {"city": "", "day": ""}}}]
    view = _without_nulls(tokenizer, calls, None)
    assert Hasher.hash(view) != Hasher.hash(tokenizer)
    for other in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        other.apply_chat_template(said({"function": {"arguments": {"city": "P", "day": None}}}))
        assert other.calls == [{"function": {"arguments": {"city": "P"}}}]


def test_conversations_of_a_batch_are_rendered_as_they_are() -> None:
    tokenizer = SimpleNamespace(apply_chat_template=list)
    batch = [said(*WITH_NULLS), WITHOUT_CALLS]
    assert _without_nulls(tokenizer, [{"function": {}}], None).apply_chat_template(batch) == batch


def test_a_dataset_of_another_kind_is_left_to_trl() -> None:
    def prepare(dataset: Any, processing_class: Any) -> Any:
        return dataset, processing_class

    tokenizer, rows = Tokenizer(), [{"text": "a"}]
    call = Call(prepare, None, (rows, tokenizer))
    assert drop_what_arrow_adds(call) == (rows, tokenizer)
    assert not call.acted
