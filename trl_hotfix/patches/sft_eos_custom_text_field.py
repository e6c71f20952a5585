"""SFT: no end-of-sequence token is added to a text field that is not called ``text``.

Since 0.17.0 (pull request 3328) ``_prepare_dataset`` ends each text with the end-of-sequence token before it is
tokenised: that in the column ``text``. With another ``dataset_text_field`` there is no such column, nothing is added,
and the model never learns to stop. 0.16 added the token after tokenising, whatever the column's name.

TRL 1.15.0 adds it to the column that ``dataset_text_field`` names. So does this, before the call, to the texts that do
not end with it. A tokenizer that ends each text by itself (``add_eos_token=True``) is left to do so. With a
``formatting_func`` it is another bug that the column is tokenised at all: ``sft-formatting-func-ignored``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, prepared_first, replaced_argument
from ..model import Outcome, Verdict
from ..stubs import CharacterTokenizer, sft_prepared


def end_the_texts(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the method texts that end with the end-of-sequence token, in the column that is tokenised."""
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func = (
        argument(wrapped, args, kwargs, name) for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    field = settings.dataset_text_field
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    eos_token = getattr(tokenizer, "eos_token", None)
    if field == "text" or eos_token is None or formatting_func is not None or not _is_text(module, dataset, field):
        return wrapped(*args, **kwargs)
    text = next(iter(dataset))[field].removesuffix(eos_token) or "a"
    if tokenizer(text)["input_ids"][-1:] == [tokenizer.eos_token_id]:
        return wrapped(*args, **kwargs)

    def ended(example: Mapping[str, Any]) -> dict[str, str]:
        text: str = example[field]
        return {field: text if text.endswith(eos_token) else text + eos_token}

    name = argument(wrapped, args, kwargs, "dataset_name")
    dataset = prepared_first(module, dataset, ended, settings, f"Adding EOS to {field} of {name} dataset")
    args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", dataset)
    return wrapped(*args, **kwargs)


def _is_text(module: ModuleType, dataset: Any, field: str) -> bool:
    """Is ``field`` what TRL will tokenise: a text, in an example that is nothing else?"""
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    if "input_ids" in first or "prompt" in first or not isinstance(first.get(field), str):
        return False
    return not module.is_conversational(module.maybe_convert_to_chatml(first))


def texts_end(module: ModuleType) -> Outcome:
    """Is a text in ``content`` ended with the end-of-sequence token, as one in ``text`` is?"""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in prepare.__code__.co_varnames:
        return absent("this release adds no end-of-sequence token")
    words = CharacterTokenizer()
    last = {
        field: sft_prepared(module, [{field: "ab"}], words, dataset_text_field=field)[0]["input_ids"][-1]
        for field in ("text", "content")
    }
    if last["text"] != words.eos_token_id:
        return absent("this release adds no end-of-sequence token")
    return Outcome(Verdict.FIXED if last["content"] == words.eos_token_id else Verdict.REPRODUCED, {"last": last})
