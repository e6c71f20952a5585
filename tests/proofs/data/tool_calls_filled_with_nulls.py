"""Train two steps of two micro-batches with the real SFTTrainer on calls of three tools, and evaluate.

Each tool has an argument of another name, so Arrow adds two nulls to each call. The chat template writes the names and
values of all arguments that it is given. Losses and gradients are compared with those of the tokens with the arguments
of each call alone (right), and of those with the nulls too (wrong). The tokens are made without TRL. DPO, KTO, Reward
and TPO prepare such calls too, and their tokens are compared.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.backward import measure_factors
from tiny.every_trainer import _classifier
from tiny.sft_steps import judged_sft_steps

ID = "tool-calls-filled-with-nulls"
OVERLAYS = ()
PARITY = False
DATA = True
EQUIVALENT = {"applied twice": "the inner view is given no nulls"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

EOS, UNKNOWN = 1, 2
"""The second is the token of the word None."""

COLUMNS = {
    "DPO": ("prompt", "chosen", "rejected"),
    "KTO": ("prompt", "completion"),
    "Reward": ("chosen", "rejected"),
    "TPO": ("prompt", "chosen", "rejected", "reference"),
}
TEMPLATE = (
    "{% for message in messages %}{{ 'w58 ' if message.role == 'user' else 'w59 ' }}{{ message.content ~ ' ' }}"
    "{% for call in message.tool_calls or [] %}{{ 'w57 ' }}{% if call.function.arguments is string %}"
    "{{ call.function.arguments ~ ' ' }}{% else %}{% for name, value in call.function.arguments.items() %}"
    "{{ name ~ ' ' ~ value ~ ' ' }}{% endfor %}{% endif %}{% endfor %}{{ '<eos> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
)


def question(row: int) -> str:
    return " ".join(f"w{4 + (5 * row + 3 * word) % 20}" for word in range(1 + row % 3)) + f" w{30 + row}"


def argument(row: int) -> tuple[str, str]:
    return f"w{1 + row % 3}", f"w{24 + row}"


def messages(row: int, arguments: Any = None) -> list[dict[str, Any]]:
    """Return a question, and an answer that calls a tool with its argument, or with these ``arguments``."""
    arguments = dict([argument(row)]) if arguments is None else arguments
    call = {"type": "function", "function": {"name": "w50", "arguments": arguments}}
    return [
        {"role": "user", "content": question(row)},
        {"role": "assistant", "content": "w3", "tool_calls": [call]},
    ]


def tokens(row: int, arguments: str) -> list[int]:
    return list(tiny.tokenizer()(f"w58 {question(row)} <eos> w59 w3 w57 {arguments} <eos>")["input_ids"])


def right(row: int) -> list[int]:
    return tokens(row, " ".join(argument(row)))


def wrong(row: int) -> list[int]:
    name, value = argument(row)
    return tokens(row, " ".join(f"w{number} {value if name == f'w{number}' else 'None'}" for number in (1, 2, 3)))


def sft_steps(rows: list[dict[str, Any]], *, streaming: bool) -> tuple[Any, Any]:
    """Return a trainer that has trained two steps and evaluated, and a model for the formulas."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "gradient_accumulation_steps": 2, "max_steps": 2}
    # 1.0.0rc1 cannot cut a stream with such calls.
    settings |= dict.fromkeys(("max_length", "max_seq_length"), None if streaming else 48)
    # The arguments go into the fingerprints of the data.
    settings |= {name: str(Path(tempfile.gettempdir(), "calls")) for name in ("output_dir", "logging_dir")}
    data = Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        model, copy = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, **settings),
            train_dataset=data.to_iterable_dataset() if streaming else data,
            eval_dataset=data.select(range(2)).to_iterable_dataset() if streaming else data.select(range(2)),
            tokenizer=tiny.chat_tokenizer(TEMPLATE),
        )
        factors = measure_factors(trainer)
        trainer.train()
        trainer.evaluate()
    (factor,) = factors
    for step in trainer.steps:
        step.gradients = {name: gradient / factor for name, gradient in step.gradients.items()}
    return trainer, copy


def kind(make: Callable[[int], list[int]]) -> Callable[[Any], Any]:
    """Return what makes of a row that was trained on the one that ``make`` makes. Releases add an end to a row."""
    places = {tuple(each(row)): row for each in (right, wrong) for row in range(8)}

    def row_at_its_place(row: Any) -> Any:
        ids = row[0]
        ends = len(ids) - len(without_ends(ids)) - 1
        expected = make(places[(*without_ends(ids), EOS)]) + [EOS] * ends
        return expected, expected

    return row_at_its_place


def without_ends(ids: list[int]) -> list[int]:
    length = len(ids)
    while ids[length - 1] == EOS:
        length -= 1
    return ids[:length]


def prepared_by(name: str) -> tuple[Outcome, bool] | None:
    """Judge the tokens that this trainer makes, and return whether TRL drops the nulls. None if it is no target."""
    trainer_class, config_class = tiny.classes(name)
    if trainer_class is None:
        return None
    trainer_class = trainer_class.__mro__[1] if "experimental" in str(trainer_class.__mro__[1]) else trainer_class
    prepare = inspect.unwrap(getattr(trainer_class, "_prepare_dataset", print))
    if "dataset_name" not in inspect.signature(prepare).parameters:
        return None
    is_right = hasattr(importlib.import_module(prepare.__module__), "remove_none_values")
    prompt = "prompt" in COLUMNS[name]
    rows = [
        {column: side(row, column, prompt) for column in COLUMNS[name]}
        | ({"label": row % 2 == 0} if name == "KTO" else {})
        for row in range(8)
    ]
    texts = prepared_texts(name, trainer_class, config_class, rows)
    expected = {
        make: [without_ends(make(row)) for row in range(8) for _ in COLUMNS[name][prompt:]] for make in (right, wrong)
    }
    assert texts in expected.values(), (name, texts, expected[right])
    nulls = {make: float(sum(ids.count(UNKNOWN) for ids in rows)) for make, rows in expected.items()}
    measured = float(sum(ids.count(UNKNOWN) for ids in texts))
    return judge(measured, right=nulls[right], wrong=nulls[wrong]), is_right


def side(row: int, column: str, prompt: bool, *arguments: Any) -> list[dict[str, Any]]:
    if column == "prompt":
        return messages(row)[:1]
    return messages(row, *arguments)[1:] if prompt else messages(row, *arguments)


def prepared_texts(name: str, trainer_class: Any, config_class: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of each prompt with each of its completions, without their ends."""
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            trainer_class,
            model=_classifier("Reward") if name == "Reward" else tiny.llama(folder, seed=0),
            args=tiny.config(config_class, max_length=64),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.chat_tokenizer(TEMPLATE),
        )

    def ids(row: dict[str, Any], column: str) -> list[int]:
        return list(row.get(f"{column}_ids", row.get(f"{column}_input_ids", [])))

    sides = [column for column in COLUMNS[name] if column != "prompt"]
    return [without_ends(ids(row, "prompt") + ids(row, side)) for row in trainer.train_dataset for side in sides]


def dpo_steps(rows: list[dict[str, Any]]) -> Any:
    """Return a DPO trainer that has trained two steps, for the release whose SFT takes no conversations."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.stepwise(DPOTrainer),
            model=tiny.llama(folder, seed=0),
            args=tiny.config(DPOConfig, gradient_accumulation_steps=2, max_steps=2, optim="sgd", learning_rate=0.5),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.chat_tokenizer(TEMPLATE),
        )
        trainer.train()
    return trainer


def pairs(*arguments: Any) -> list[dict[str, Any]]:
    return [{name: side(row, name, True, *arguments) for name in COLUMNS["DPO"]} for row in range(8)]


def key_of_the_cache() -> str:
    """Return the fingerprint of a dataset that a trainer has prepared whose TRL drops no nulls.

    A whole trainer is in the fingerprints of some releases, with its weights, and this one has none.
    """
    from datasets import Dataset

    from trl_hotfix.testing import default_arguments, single_process, stub_trainer

    modules = {name: f"trl.trainer.{name.lower()}_trainer" for name in ("SFT", "DPO")}
    modules["GOLD"] = "trl.experimental.gold.gold_trainer"
    for name, path in modules.items():
        module = importlib.import_module(path)
        trainer_class = getattr(module, f"{name}Trainer")
        taken = inspect.signature(inspect.unwrap(trainer_class._prepare_dataset)).parameters
        if "dataset_name" in taken and not hasattr(module, "remove_none_values"):
            break
    rows = {
        "SFT": [{"messages": messages(row)} for row in range(8)],
        "DPO": pairs(),
        "GOLD": [{"prompt": messages(row)[:1], "completion": messages(row)[1:]} for row in range(8)],
    }
    words = tiny.chat_tokenizer(TEMPLATE)
    settings = {"max_length": None, "max_seq_length": None, "completion_only_loss": False}
    args = default_arguments(getattr(module, f"{name}Config"), **settings)
    of_a_trainer = {"chat_template": None, "_is_vlm": False, "_tokenizer": words, "is_vision_model": False}
    trainer = stub_trainer(trainer_class, args, use_uld_loss=False, teacher_tokenizer=None, **of_a_trainer)
    known = {"packing": False, "formatting_func": None}
    options = {option: value for option, value in known.items() if option in taken}
    with single_process(module):
        dataset = trainer._prepare_dataset(Dataset.from_list(rows[name]), words, args, dataset_name="train", **options)
    return str(dataset._fingerprint)


def takes_conversations() -> bool:
    from trl.trainer import sft_trainer

    return "dataset_name" in inspect.signature(inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset)).parameters


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    outcomes = [judged for name in COLUMNS if (judged := prepared_by(name))]
    hit = [outcome for outcome, is_right in outcomes if not is_right]
    assert all(outcome.verdict is Verdict.FIXED for outcome, is_right in outcomes if is_right), outcomes
    if not hit and not takes_conversations():
        return tiny.TrainingResult(absent("this release prepares no conversations in a method of its own"))
    if takes_conversations():
        # TRL reads a dataset, but not a stream, without nulls in some releases.
        streaming = hasattr(sft_trainer, "remove_none_values")
        trainer, model = sft_steps([{"messages": messages(row)} for row in range(8)], streaming=streaming)
        outcome = judged_sft_steps(trainer, model, {"right": kind(right), "wrong": kind(wrong)})
    else:
        trainer, outcome = dpo_steps(pairs()), hit[0]
    assert {each.verdict for each in hit} <= {outcome.verdict}, (outcome, outcomes)
    tiny.state.fingerprints[:] = [key_of_the_cache()]
    return tiny.result_of_runs({"run": trainer}, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train on calls whose arguments are a text, and on calls that all have the same ones."""
    runs = {}
    with tiny.counted(ID) as counts:
        for name, arguments in {"text": "w1 w2", "same": {"w1": "w2", "w3": "w4"}}.items():
            if takes_conversations():
                rows = [{"messages": messages(row, arguments)} for row in range(8)]
                runs[name], _ = sft_steps(rows, streaming=False)
            else:
                runs[name] = dpo_steps(pairs(arguments))
        assert not counts().acted, "the wrapper acts"
    return tiny.result_of_runs(runs, absent("no call has a null"))
