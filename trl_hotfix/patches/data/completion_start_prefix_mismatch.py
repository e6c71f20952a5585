"""SFT, DPO and KTO take the first tokens of a completion for the end of the prompt.

``_prepare_dataset`` tokenises the prompt, and the prompt with its completion, and lets the completion start at
``len(prompt_ids)``. That is right only if ``prompt_ids`` is a prefix of the ids of both together.

Since 1.14.2 the completion starts where the two diverge, in DPO where the first of the two completions does:
``prompt_len = max{k : prompt_ids[:k] == prompt_completion_ids[:k]}``. The wrappers give the method a view of the
tokenizer that keeps the list that it has returned for a prompt. When that prompt is tokenised with a completion, the
view deletes the ids that the two do not share from this very list. That works because TRL takes the list's length only
afterwards. Templates, tools, masks, truncation and packing are left to TRL.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import logging
import operator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...authoring import Call, Mark, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, default_arguments, recorded_warnings, single_process, stream, stub_trainer


@wrapper
def start_the_completion_of_sft(call: Call) -> Any:
    """Handle rows of a prompt and a completion. With a formatting function, and without prompts, a row is one text."""
    if call["formatting_func"] is None and "prompt" in next(iter(call["dataset"])):
        return _with_view(call, completions=1)
    return call()


@wrapper
def start_the_completion_of_kto(call: Call) -> Any:
    """Handle rows of a prompt and a completion, into which TRL also splits pairs, and whose prompts it extracts."""
    return _with_view(call, completions=1)


@wrapper
def start_the_completions_of_dpo(call: Call) -> Any:
    """Handle rows of a prompt and two completions. TRL extracts the prompts if the rows lack them."""
    return _with_view(call, completions=2)


def _with_view(call: Call, completions: int) -> Any:
    """Call the method with a view of its tokenizer."""
    view = _view(call["processing_class"], completions, act=call.act_later())
    return call.with_(processing_class=view)()


def _view(processing_class: Any, completions: int, code: str = "", act: Mark | None = None) -> Any:
    """Return a view of ``processing_class`` whose prompt ids are a prefix of those of prompt and completion.

    It says ``act`` when it cuts a prompt, and that it has seen one otherwise.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        _self_prompt: Any = ""
        _self_prompt_ids: Any = ()
        _self_completions_left = 0
        _self_warned = False
        _self_act = Mark() if act is None else act

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _view, (self.__wrapped__, completions, hashlib.sha256(Path(__file__).read_bytes()).hexdigest())

        def __deepcopy__(self, memo: Any) -> Any:
            # KTO concatenates streams, which datasets copies with what their functions are given.
            return _view(copy.deepcopy(self.__wrapped__, memo), completions)

        def __call__(self, text: Any, **kwargs: Any) -> Any:
            return self._record(text, self.__wrapped__(text=text, **kwargs))

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return self._record(conversation, self.__wrapped__.apply_chat_template(conversation, **kwargs))

        def _record(self, text: Any, result: Any) -> Any:
            """Keep the ids of a prompt, or shorten the kept ids by those of the prompt with one of its completions."""
            ids = result["input_ids"] if hasattr(result, "keys") else result
            if isinstance(ids, str):
                return result  # The template was only rendered.
            if isinstance(next(iter(ids), None), list):
                (ids,) = ids  # A processor returns a batch of one.
            # A text that does not begin with the prompt has no completion. Then it is the next prompt.
            if self._self_completions_left and text[: len(self._self_prompt)] == self._self_prompt:
                self._self_completions_left -= 1
                self._shorten(ids)
            else:
                self._self_prompt, self._self_prompt_ids, self._self_completions_left = text, ids, completions
            return result

        def _shorten(self, ids: list[int]) -> None:
            prompt_ids = self._self_prompt_ids
            shared = sum(itertools.takewhile(bool, map(operator.eq, prompt_ids, ids)))
            self._self_act.saw()
            # TRL reads the first id of each prompt, so one id has to remain.
            if 0 < shared < len(prompt_ids):
                if not self._self_warned:
                    self._self_warned = True
                    logging.getLogger("trl_hotfix").warning(
                        "The prompt is tokenised in another way with its completion than without: it then goes on "
                        "without %r. The completion is trained from there on, as TRL 1.14.2 does. A chat template "
                        "that renders both alike, or a prompt that ends where a token ends, would train the prompt "
                        "that is used at inference. Said once for each dataset",
                        self.__wrapped__.decode(prompt_ids[shared:]),
                    )
                del prompt_ids[shared:]
                self._self_act()

    return View(processing_class)


def completion_is_whole(module: ModuleType) -> Outcome:
    """Count the trained tokens of a completion ``cd`` after the prompt ``ab``, where ``bc`` is one token.

    Together they are ``a``, ``bc``, ``d`` and the end. Three of these are the completion's, and two with the bug.
    """
    method = next(name for name in ("SFT", "DPO", "KTO") if name.lower() in module.__name__)
    if not hasattr(module, f"{method}Config"):
        return absent(f"the {method}Trainer of this release stands elsewhere, and is handed on here")
    trainer_class = getattr(module, f"{method}Trainer")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    taken = {} if prepare is None else inspect.signature(prepare).parameters
    if "args" not in taken or hasattr(trainer_class, "tokenize_row"):
        return absent("completions are tokenised by themselves")
    completions = {"chosen": "cd", "rejected": "d"} if method == "DPO" else {"completion": "cd", "label": True}
    rows, tokenizer = stream([{"prompt": "ab", **completions}]), _MergingTokenizer()
    settings = default_arguments(getattr(module, f"{method}Config"), max_length=None, shuffle_dataset=False)
    known = {"completion_only_loss": True, "chat_template": None, "calculate_KL": False, "_is_vlm": False}
    trainer = stub_trainer(trainer_class, settings, _tokenizer=tokenizer, **known)
    options = {"packing": False, "formatting_func": None, "dataset_name": "train"}
    options = {name: value for name, value in options.items() if name in taken}
    with recorded_warnings(), single_process(module):
        (row,) = trainer._prepare_dataset(rows, tokenizer, settings, **options)
    if "completion_mask" in row:
        trained = sum(row["completion_mask"])
    elif "labels" in row:
        trained = sum(label != -100 for label in row["labels"])
    elif method == "SFT":
        return absent("there is no loss of the completion alone")
    else:
        trained = len(row["chosen_ids" if method == "DPO" else "completion_ids"])
    return judge(trained, right=3, wrong=2)


class _MergingTokenizer(CharacterTokenizer):
    """Make one token of ``bc``."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("bc", "\2"), **kwargs)
