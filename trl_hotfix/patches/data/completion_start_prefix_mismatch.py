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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ...authoring import Mark, absent, act_of_this_call, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer


def start_the_completion_of_sft(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and a completion. With a formatting function, and without prompts, a row is one text."""
    formatting_func = argument(wrapped, args, kwargs, "formatting_func")
    if formatting_func is None and "prompt" in next(iter(argument(wrapped, args, kwargs, "dataset"))):
        args, kwargs = _with_view(wrapped, args, kwargs, 1)
    return wrapped(*args, **kwargs)


def start_the_completion_of_kto(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and a completion, into which TRL also splits pairs, and whose prompts it extracts."""
    args, kwargs = _with_view(wrapped, args, kwargs, 1)
    return wrapped(*args, **kwargs)


def start_the_completions_of_dpo(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle rows of a prompt and two completions, whose prompts TRL extracts if there are none."""
    args, kwargs = _with_view(wrapped, args, kwargs, 2)
    return wrapped(*args, **kwargs)


def _with_view(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], completions: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the method with a view of its tokenizer."""
    view = _view(argument(wrapped, args, kwargs, "processing_class"), completions, act=act_of_this_call())
    return replaced_argument(wrapped, args, kwargs, "processing_class", view)


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
            # A text that does not begin with the prompt is none with a completion. Then it is the next prompt.
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


_ROWS = (
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


def completion_is_whole(module: ModuleType) -> Outcome:
    """Check prompts and completions where the prompt's last letter and the completion's first one are one token.

    The tokens of ``ab`` and ``cd`` with an end of sequence are ``a``, ``bc``, ``d`` and the end. Three must be trained.
    """
    method = next(name for name in ("SFT", "DPO", "KTO") if name.lower() in module.__name__)
    if not hasattr(module, f"{method}Config"):
        return absent(f"the {method}Trainer of this release stands elsewhere, and is handed on here")
    trainer_class = getattr(module, f"{method}Trainer")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters or hasattr(trainer_class, "tokenize_row"):
        return absent("completions are tokenised by themselves")
    with _no_warning(), single_process(module):
        _check_view()
        return _judged(module, trainer_class, method)


def _judged(module: ModuleType, trainer_class: Any, method: str) -> Outcome:
    tokenizer = _MergingTokenizer()
    settings = default_arguments(getattr(module, f"{method}Config"), max_length=None, shuffle_dataset=False)
    known = {"completion_only_loss": True, "chat_template": None, "calculate_KL": False, "_is_vlm": False}
    trainer = stub_trainer(trainer_class, settings, _tokenizer=tokenizer, **known)
    taken = inspect.signature(trainer_class._prepare_dataset).parameters

    def prepared(rows: list[dict[str, Any]], formatting_func: Any = None) -> list[dict[str, Any]]:
        tokenizer.decoded.clear()
        options = {"packing": False, "formatting_func": formatting_func, "dataset_name": "eval"}
        options = {name: value for name, value in options.items() if name in taken}
        return list(trainer._prepare_dataset(stream(rows), tokenizer, settings, **options))

    rows = [_row(method, number, *row[:2]) for number, row in enumerate(_ROWS)]
    outcome, warns_once = None, False
    # The trainer prepares a dataset to train on, and one to evaluate.
    for start in (0, 4):
        trained = [_trained(row) for row in prepared(rows[start:])]
        if trained[0] is None:
            return absent("there is no loss of the completion alone")
        outcome = outcome or judge(float(len(trained[0][0])), right=3.0, wrong=2.0)
        warns_once = tokenizer.decoded == ["b"]
        lengths = [len(prompt if outcome.verdict is Verdict.REPRODUCED else left) for prompt, _, left in _ROWS]
        if outcome.verdict is Verdict.FIXED and not warns_once:
            lengths[-1] = 0  # TRL's own repair cuts such a prompt, too, and warns of each.
        expected = [_expected(tokenizer, *row)[: len(trained[0])] for row in zip(rows, lengths, strict=True)]
        if trained != expected[start:]:
            raise AssertionError(f"{trained} instead of {expected[start:]}, warned of {tokenizer.decoded}")
    assert outcome is not None
    if method == "SFT" and warns_once:
        # The end of the first text and the second letter of the second are one token, but these are no completions.
        prepared([{"text": "ab"}, {"text": "ab\1cd"}])
        texts_warned = list(tokenizer.decoded)
        prepared(rows[:1], formatting_func=lambda row: row["prompt"])
        if texts_warned or tokenizer.decoded:
            raise AssertionError(f"texts are taken for prompts: warned of {texts_warned} and {tokenizer.decoded}")
    return outcome


def _row(method: str, number: int, prompt: str, completion: str) -> dict[str, Any]:
    """Return a row of the method's format. In every other preference the rejected completion is the one that merges."""
    if method != "DPO":
        return {"prompt": prompt, "completion": completion, "label": True}
    chosen, rejected = (completion, "yd") if number % 2 == 0 else ("yd", completion)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _trained(row: dict[str, Any]) -> list[list[int]] | None:
    """Return the trained tokens of each completion in a prepared row; in DPO and KTO those of the prompt, too."""
    pieces = [row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids", "prompt_ids") if name in row]
    if "completion_mask" in row:
        pieces = [list(itertools.compress(row["input_ids"], row["completion_mask"]))]
    elif "labels" in row:
        pieces = [[label for label in row["labels"] if label != -100]]
    return pieces or None


def _expected(tokenizer: Any, row: dict[str, Any], length: int) -> list[list[int]]:
    """Return what is trained of ``row`` if the prompt has ``length`` tokens."""
    texts = [row["prompt"] + row[name] + "\1" for name in ("chosen", "rejected", "completion") if name in row]
    completions = [tokenizer(text)["input_ids"][length:] for text in texts]
    return [*completions, tokenizer(row["prompt"])["input_ids"][:length]]


def _check_view() -> None:
    """Check the view where this release, or this method, does not use it so."""
    tokenizer = _MergingTokenizer()
    view = _view(tokenizer, 1)
    between = view(text="x")["input_ids"]
    text_ids, _ = (view(text=text)["input_ids"] for text in ("ab", "abcd"))
    copied = copy.deepcopy(view)
    copied_ids, _ = (copied(text=text)["input_ids"] for text in ("ab", "abcd"))
    batch_of_one = _view(lambda text: {"input_ids": [tokenizer(text)["input_ids"]]}, 1)
    batch_of_one.decode = tokenizer.decode
    ((processed_ids,), _) = (batch_of_one(text=text)["input_ids"] for text in ("wab", "wabcd"))
    conversation = [{"role": "user", "content": "v"}]
    answered = [*conversation, {"role": "assistant", "content": "cd"}]
    view.apply_chat_template(conversation, tokenize=False)
    chat_ids = view.apply_chat_template(conversation, add_generation_prompt=True)
    view.apply_chat_template(answered, return_dict=True)
    found = [tokenizer.decode(ids) for ids in (between, text_ids, copied_ids, processed_ids, chat_ids)]
    if found != ["x", "a", "a", "wa", "uv\1a"] or copied.__wrapped__ is tokenizer:
        raise AssertionError(f"the view leaves {found} of the prompts")


@contextmanager
def _no_warning() -> Iterator[None]:
    """Keep the warnings of this thread to itself: they are of no run."""
    thread, log = threading.get_ident(), logging.getLogger("trl_hotfix")

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        log.removeFilter(is_of_another_thread)


class _MergingTokenizer(CharacterTokenizer):
    """Make one token of ``bc``, and of an end of sequence with ``c``. Its generation prompt has a ``~`` too many."""

    def __init__(self) -> None:
        self.decoded: list[str] = []

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("bc", "\2").replace("\1c", "\3"), **kwargs)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt)
        return rendered + "~" if add_generation_prompt else rendered

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.decoded.append(super().decode(ids))
        return self.decoded[-1]
