"""SFT, DPO, KTO, TPO and RewardTrainer put an end of sequence behind a text whose tokenizer puts one there, too.

``add_eos`` of ``_prepare_dataset`` appends ``eos_token`` to every text that lacks it. Then the tokenizer appends the
token again if it was made with ``add_eos_token=True``. A text that ends with ``eos_token`` by itself also ends twice.
SFT appends since 0.17.0, Reward since 0.24.0, DPO since 0.29.0, KTO and TPO since 1.3.0.

Where prompts are tokenized for themselves they get the end as well. It must go with the other: the completion begins
where prompt and sequence differ, and an empty completion has nothing but its end.
"""

from __future__ import annotations

import copy
import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, pickled_as_made, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    absent_if_reexported,
    default_arguments,
    quick_rows,
    single_process,
    stub_trainer,
    trainer_and_config,
)


@wrapper
def end_pairs_once(call: Call) -> Any:
    """Give TRL a tokenizer that adds no end to prompts and completions."""
    row = _first(call)
    names = [name for name in ("prompt", "completion", "chosen", "rejected") if name in row]
    return _end_once(call, [row[name] for name in names], True)


@wrapper
def end_texts_once(call: Call) -> Any:
    """Give SFT a tokenizer that adds no second end to texts, and none to prompts and completions."""
    row, field = _first(call), call["args"].dataset_text_field
    if "input_ids" in row:
        return call()
    text, prompts = row.get(field), False
    if call["formatting_func"] is not None:
        text = "made by the function"
    elif "prompt" in row:
        # TRL appends no end to a completion beside a text.
        text, prompts = row["prompt"], not {"text", field} & row.keys()
    return _end_once(call, [text], prompts)


def _first(call: Call) -> Any:
    return next(iter(call["dataset"]), {})


def _end_once(call: Call, of_first_row: list[Any], prompts: bool) -> Any:
    """Do so if the first row has texts, and the tokenizer adds an end to them."""
    given = call["processing_class"]
    is_text = bool(of_first_row) and all(isinstance(part, str) for part in of_first_row)
    # A view of another patch's would take what is asked here for the first row.
    if not is_text or not _adds_end(inspect.unwrap(given)):
        return call()
    call.act()
    return call.with_(processing_class=_ending_once(given, prompts))()


def _adds_end(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts its end-of-sequence token behind a text."""
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None:
        return False
    expected = [*tokenizer("a", add_special_tokens=False)["input_ids"], end]
    return bool(tokenizer("a")["input_ids"][-len(expected) :] == expected)


def _ending_once(tokenizer: Any, prompts: bool, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that leaves out the second end; with ``prompts`` the end that it has added."""
    import wrapt

    if hasattr(tokenizer, "__wrapped__") and type(tokenizer).__module__.startswith("trl_hotfix.patches."):
        # The view of another patch has to see the ids that TRL sees, so this one goes beneath it.
        tokenizer.__wrapped__ = _ending_once(tokenizer.__wrapped__, prompts)
        return tokenizer
    ends = [tokenizer.eos_token_id] * (1 if prompts else 2)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_ending_once, self.__wrapped__, prompts)

        def __deepcopy__(self, memo: Any) -> Any:
            # KTO concatenates streams, which datasets copies with what their functions are given.
            return _ending_once(copy.deepcopy(self.__wrapped__, memo), prompts)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **kwargs)
            if encoded["input_ids"][-len(ends) :] == ends:
                for name in list(encoded):
                    encoded[name] = encoded[name][:-1]
            return encoded

    return View(tokenizer)


class _Ending(CharacterTokenizer):
    """A tokenizer that puts the character 1 behind a text."""

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(text + "\1" * add_special_tokens)


def texts_end_once(module: ModuleType) -> Outcome:
    """Count the ends of two sequences. The tokenizer puts one behind each text, and one text has its own."""
    trainer_class, config_class = trainer_and_config(module, "SFT", "DPO", "KTO", "TPO", "Reward")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    if prepare is None:
        return absent("this release prepares datasets in no method of its own")
    if reexported := absent_if_reexported(module, prepare):
        return reexported
    if not any(getattr(each, "co_name", "") == "add_eos" for each in inspect.unwrap(prepare).__code__.co_consts):
        return absent("this release appends no end of sequence")
    columns: dict[str, Any] = dict.fromkeys(("chosen", "rejected", "reference"))
    if hasattr(module, "SFTTrainer"):
        columns = {"text": None}
    elif hasattr(module, "KTOTrainer"):
        columns = {"completion": None}
    more = {} if "text" in columns else {"prompt": "u", "label": True}
    rows = quick_rows([{**more, **dict.fromkeys(columns, text)} for text in ("ab", "a\1")])
    tokenizer = _Ending()
    known = {"_tokenizer": tokenizer, "_is_vlm": False, "calculate_KL": False, "completion_only_loss": False}
    trainer = stub_trainer(trainer_class, default_arguments(config_class), chat_template=None, **known)
    settings = {"dataset": rows, "processing_class": tokenizer, "args": trainer.args, "dataset_name": "train"}
    settings |= {"packing": False, "formatting_func": None}
    taken = inspect.signature(prepare).parameters
    with single_process(module):
        prepared = list(prepare(trainer, **{name: settings[name] for name in settings if name in taken}))
    names = ("input_ids", "chosen_ids", "chosen_input_ids", "completion_ids")
    ids = [next(row[name] for name in names if name in row) for row in prepared]
    return judge(sum(row.count(1) for row in ids), right=2, wrong=4)
