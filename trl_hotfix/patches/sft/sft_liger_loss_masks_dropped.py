"""With the Liger kernel ``_prepare_dataset`` of SFT drops the masks that say which tokens are in the loss.

Its last line selects the columns that it takes for needed: ``input_ids`` (0.17 and 0.18), with ``position_ids`` (0.19),
or with ``seq_lengths`` and ``completion_mask`` (0.20 and 0.21). The collator reads the masks too, and what it does not
find it does not apply. Pull request 3674 added the one mask to this line, and 3914 the other.

The wrapper has the dataset prepared as without Liger, and selects the columns itself, the masks among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared

_READ_BY_COLLATOR = ("input_ids", "position_ids", "seq_lengths", "completion_mask", "assistant_masks")
"""What a collator of 0.17 to 0.21 may read of a prepared row; ``labels`` are dropped to this day."""


def keep_masks(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep the masks of completions and of assistants (0.17.0 to 0.19.1)."""

    def has_mask(settings: Any, row: Mapping[str, Any]) -> bool:
        is_pair = instance.completion_only_loss and ("prompt" in row or "completion_mask" in row)
        return bool(is_pair) or _has_assistant_masks(settings, row)

    return _prepare(has_mask, wrapped, args, kwargs)


def keep_assistant_masks(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Keep the masks of assistants (0.20.0 and 0.21.0)."""
    return _prepare(_has_assistant_masks, wrapped, args, kwargs)


def _has_assistant_masks(settings: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a dataset with this first row has masks of assistants, or gets them, and the collator reads them.

    It reads those that a tokenised dataset has, whatever the setting is; where there is no setting, it reads none.
    """
    assistant_only = getattr(settings, "assistant_only_loss", None)
    return assistant_only is not None and (assistant_only or "assistant_masks" in row)


def _prepare(
    has_mask: Callable[[Any, Mapping[str, Any]], bool],
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Prepare a dataset that has a mask, or gets one, without the last line of the method."""
    from datasets import Dataset, IterableDataset

    dataset, settings = (argument(wrapped, args, kwargs, name) for name in ("dataset", "args"))
    if not settings.use_liger_kernel or not isinstance(dataset, (Dataset, IterableDataset)):
        return wrapped(*args, **kwargs)
    if not has_mask(settings, next(iter(dataset))):
        return wrapped(*args, **kwargs)
    with shadowed(settings, "use_liger_kernel", False):
        prepared = wrapped(*args, **kwargs)
    # A stream may not know its columns.
    return prepared.select_columns([name for name in next(iter(prepared)) if name in _READ_BY_COLLATOR])


def masks_are_kept(module: ModuleType) -> Outcome:
    """Check which tokens of completions and of assistants are trained with the Liger kernel, and without it.

    Liger itself is not needed to prepare a dataset. Six tokens of the completions are to be trained, of 13, and four of
    the assistants, of 11.
    """
    if "completion_only_loss" not in getattr(module.SFTConfig, "__dataclass_fields__", {}):
        return absent("this release has no loss of completions alone")
    kinds: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str], int]] = {
        "completions": (_PAIRS, {"completion_only_loss": True}, ["cd\1", "f\1", "\1"], 13)
    }
    if "assistant_only_loss" in module.SFTConfig.__dataclass_fields__:
        kinds["assistants"] = (_CONVERSATIONS, {"assistant_only_loss": True}, ["YZ", "Y", "Z"], 11)
    outcomes = []
    for rows, settings, expected, tokens in kinds.values():
        with_liger, without = (_trained(module, rows, use_liger_kernel=liger, **settings) for liger in (True, False))
        count = float(len("".join(with_liger)))
        outcomes.append(judge(count, right=float(len("".join(expected))), wrong=float(tokens)))
        fixed = outcomes[-1].verdict is Verdict.FIXED
        if without != expected or (fixed and with_liger != expected):
            raise AssertionError(f"{with_liger} are trained with Liger and {without} without it, and not {expected}")
    lost = [outcome for outcome in outcomes if outcome.verdict is Verdict.REPRODUCED]
    if not lost and (mistakes := _mistakes_elsewhere()):
        raise AssertionError("; ".join(mistakes))
    return (lost or outcomes)[0]


_PAIRS = [{"prompt": prompt, "completion": text} for prompt, text in (("ab", "cd"), ("e", "f"), ("ghij", ""))]
_CONVERSATIONS = [
    {"messages": [{"role": role, "content": text} for role, text in turns]}
    for turns in ((("user", "x"), ("assistant", "YZ")), (("assistant", "Y"),), (("user", "x"), ("assistant", "Z")))
]


class _Tokenizer(CharacterTokenizer):
    """Its template has a letter for the role and the content, of which that of an assistant is in the mask."""

    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    """What assistant-mask-without-end-of-turn asks for, if it is on: no token ends a turn."""

    def apply_chat_template(self, messages: list[dict[str, str]], *args: Any, **kwargs: Any) -> Any:
        processed = self("".join(message["role"][0] + message["content"] for message in messages))
        mask = [
            int(message["role"] == "assistant" and place > 0)
            for message in messages
            for place in range(1 + len(message["content"]))
        ]
        return {**processed, "assistant_masks": mask}


def _trained(module: ModuleType, rows: list[dict[str, Any]], **settings: Any) -> list[str]:
    """Return the tokens of each row that are trained, as the collator reads the prepared rows."""
    texts = []
    for row in sft_prepared(module, rows, _Tokenizer(), **settings):
        ids = row["input_ids"]
        mask = row.get("completion_mask") or row.get("assistant_masks")
        mask = mask or [label != -100 for label in row.get("labels", ids)]
        texts.append("".join(chr(token) for token, is_trained in zip(ids, mask, strict=True) if is_trained))
    return texts


def _mistakes_elsewhere() -> list[str]:
    """Return what is wrong with datasets that have no mask, or whose mask is kept or not read, and with the others."""
    masked = {"input_ids": [1], "completion_mask": [1], "assistant_masks": [1]}
    pair, whole = (SimpleNamespace(completion_only_loss=value) for value in (True, False))
    some, answers = ({"use_liger_kernel": True, "assistant_only_loss": value} for value in (False, True))
    both = keep_masks, keep_assistant_masks
    runs: list[tuple[str, tuple[Any, ...], Any, Any, dict[str, Any]]] = [
        ("without Liger", both, _rows(masked), pair, {**answers, "use_liger_kernel": False}),
        ("a list", both, [masked], pair, answers),
        ("texts", both, _rows({"text": "a"}), pair, some),
        ("all tokens", both, _rows({"prompt": "a", "completion": "b"}), whole, some),
        ("all tokens of a mask", both, _rows({"input_ids": [1], "completion_mask": [1]}), whole, some),
        ("no setting for assistants", both, _rows(masked), whole, {"use_liger_kernel": True}),
        ("completions of 0.20", both[1:], _rows({"prompt": "a", "completion_mask": [1]}), pair, some),
    ]
    mistakes = []
    for name, wrappers, dataset, trainer, settings in runs:
        for wrapper in wrappers:
            prepare = _Prepare()
            if wrapper(prepare, trainer, (dataset, SimpleNamespace(**settings)), {}) is not dataset:
                mistakes.append(f"{name}: {wrapper.__name__} gives another dataset")
            if prepare.with_liger != [settings["use_liger_kernel"]]:
                mistakes.append(f"{name}: {wrapper.__name__} calls the method with {prepare.with_liger}")
    row = {"labels": [1], "text": "a", **{name: [1] for name in _READ_BY_COLLATOR}}
    for wrapper, trainer, settings, given in (
        (keep_masks, pair, some, {name: value for name, value in row.items() if name != "assistant_masks"}),
        (keep_masks, pair, {"use_liger_kernel": True}, {"input_ids": [1], "prompt": "a"}),
        (keep_masks, whole, answers, {"input_ids": [1], "seq_lengths": [1], "text": "a"}),
        (keep_masks, whole, some, row),
        (keep_assistant_masks, whole, some, row),
        (keep_assistant_masks, whole, answers, {"input_ids": [1], "labels": [1]}),
    ):
        prepare, arguments = _Prepare(), SimpleNamespace(**settings)
        (kept,) = wrapper(prepare, trainer, (), {"dataset": _rows(given), "args": arguments})
        if kept != {name: given[name] for name in _READ_BY_COLLATOR if name in given}:
            mistakes.append(f"of {list(given)} {wrapper.__name__} keeps {list(kept)}")
        if prepare.with_liger != [False] or arguments.use_liger_kernel is not True:
            mistakes.append(f"the method is called with {prepare.with_liger}, and {arguments} is left behind")
    return mistakes


def _rows(row: dict[str, Any]) -> Any:
    """Return a dataset of one row, which can be iterated and have columns selected. A real one takes milliseconds."""
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Any:
            return iter([row])

        def select_columns(self, names: list[str]) -> Any:
            return _rows({name: row[name] for name in names})

    return Rows()


class _Prepare:
    """Have the arguments of ``_prepare_dataset`` that the wrappers read, return the first, and note the setting."""

    def __init__(self) -> None:
        self.with_liger: list[bool] = []

    def __call__(self, dataset: Any, args: Any) -> Any:
        self.with_liger.append(args.use_liger_kernel)
        return dataset
