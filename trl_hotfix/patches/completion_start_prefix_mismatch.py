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

import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, judge, replaced_argument
from ..model import Outcome
from ..testing import CharacterTokenizer, default_arguments, sft_prepared, single_process, stream, stub_trainer


def start_the_completion_of_sft(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and a completion. With a formatting function, and without prompts, a row is one text."""
    if argument(wrapped, args, kwargs, "formatting_func") is not None:
        return wrapped(*args, **kwargs)
    return _with_view(wrapped, args, kwargs, completions=1)


def start_the_completion_of_kto(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and a completion, into which TRL also splits pairs."""
    return _with_view(wrapped, args, kwargs, completions=1, always=True)


def start_the_completions_of_dpo(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and two completions."""
    return _with_view(wrapped, args, kwargs, completions=2, always=True)


def _with_view(
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    completions: int,
    always: bool = False,
) -> Any:
    """Call the method with a view of its tokenizer, if the dataset has prompts.

    With ``always`` the first row is not looked at, since TRL extracts the prompts itself.
    """
    if not always and "prompt" not in next(iter(argument(wrapped, args, kwargs, "dataset"))):
        return wrapped(*args, **kwargs)
    view = _view(argument(wrapped, args, kwargs, "processing_class"), completions)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", view)
    return wrapped(*args, **kwargs)


def _view(processing_class: Any, completions: int, code: str | None = None) -> Any:
    """Return a view of ``processing_class`` whose prompt ids are a prefix of those of prompt and completion.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __init__(self, wrapped: Any) -> None:
            super().__init__(wrapped)
            self._self_prompt: Any = None
            self._self_prompt_ids: list[int] = []
            self._self_completions_left = 0
            self._self_warned = False

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _view, (self.__wrapped__, completions, hashlib.sha256(Path(__file__).read_bytes()).hexdigest())

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._record(kwargs["text"] if "text" in kwargs else args[0], self.__wrapped__(*args, **kwargs))

        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            return self._record(conversation, self.__wrapped__.apply_chat_template(conversation, *args, **kwargs))

        def _record(self, text: Any, result: Any) -> Any:
            """Keep the ids of a prompt, or shorten the kept ids by those of the prompt with one of its completions."""
            ids = result["input_ids"] if hasattr(result, "keys") else result
            if isinstance(ids, list) and ids and isinstance(ids[0], list):
                ids = ids[0]  # A processor returns a batch of one.
            if not isinstance(ids, list):
                return result  # A text: the template was only rendered.
            if self._self_completions_left == 0:
                self._self_prompt, self._self_prompt_ids, self._self_completions_left = text, ids, completions
                return result
            self._self_completions_left -= 1
            if text[: len(self._self_prompt)] == self._self_prompt:
                self._shorten(ids)
            return result

        def _shorten(self, ids: list[int]) -> None:
            prompt_ids = self._self_prompt_ids
            pairs = zip(prompt_ids, ids, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            # TRL reads the first id of each prompt, so one id has to remain.
            if not 0 < shared < len(prompt_ids):
                return
            if not self._self_warned and not isinstance(self.__wrapped__, _MergingTokenizer):
                self._self_warned = True
                logging.getLogger("trl_hotfix").warning(
                    "The prompt is tokenised in another way with its completion than without: it then goes on without "
                    "%r. The completion is trained from there on, as TRL 1.14.2 does. A chat template that renders "
                    "both alike, or a prompt that ends where a token ends, would train the prompt that is used at "
                    "inference. Said once for each dataset",
                    self.__wrapped__.decode(prompt_ids[shared:]),
                )
            del prompt_ids[shared:]

    return View(processing_class)


def completion_is_whole(module: ModuleType) -> Outcome:
    """Count the trained tokens of a completion whose first letter and the prompt's last letter are one token.

    The tokens of ``ab`` and ``cd`` with an end of sequence are ``a``, ``bc``, ``d`` and the end. Three must be trained.
    """
    method = next(name for name in ("SFT", "DPO", "KTO") if name.lower() in module.__name__)
    if not hasattr(module, f"{method}Config"):
        return absent(f"the {method}Trainer of this release stands elsewhere, and is handed on here")
    trainer_class = getattr(module, f"{method}Trainer")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters or hasattr(trainer_class, "tokenize_row"):
        return absent("completions are tokenised by themselves")
    tokenizer = _MergingTokenizer()
    pair = {"prompt": "ab", "completion": "cd"}
    if method == "SFT":
        (row,) = sft_prepared(module, [pair], tokenizer, completion_only_loss=True)
        if "completion_mask" not in row and "labels" not in row:
            return absent("there is no loss of the completion alone")
    else:
        if method == "DPO":
            pair = {"prompt": "ab", "chosen": "cd", "rejected": "cd"}
        settings = default_arguments(getattr(module, f"{method}Config"), max_length=None)
        trainer = stub_trainer(trainer_class, settings, _tokenizer=tokenizer, _is_vlm=False, calculate_KL=False)
        with single_process(module):
            rows = stream([{**pair, "label": True}])
            (row,) = trainer._prepare_dataset(rows, tokenizer, settings, "eval")
    trained = row.get("chosen_ids", row.get("completion_ids", row.get("completion_mask")))
    if trained is None:
        trained = [label for label in row["labels"] if label != -100]
    elif "completion_mask" in row:
        trained = [1] * sum(trained)
    return judge(float(len(trained)), right=3.0, wrong=2.0)


class _MergingTokenizer(CharacterTokenizer):
    """Make one token of ``bc``."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("bc", "\2"), **kwargs)
