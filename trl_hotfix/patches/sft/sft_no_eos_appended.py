"""SFT of 0.15 does not end the texts that it tokenises.

``_prepare_dataset`` tokenises a text as it is (0.15.0, line 411), and most tokenizers add no end-of-sequence token.
Pull request 3091 appends it in 0.16.0 to the token ids of every row that does not end with it. From 0.17.0 on it is put
behind texts and completions alone, since a chat template ends a conversation in its own way.

The wrapper gives TRL a view of the tokenizer that appends it to what it returns.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, pickled_as_made, wrapper
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, quick_sft_prepared


@wrapper
def end_what_is_tokenised(call: Call) -> Any:
    """Give TRL a tokenizer that ends texts, unless the dataset is tokenised already, or has conversations."""
    from datasets import Dataset, IterableDataset

    dataset, tokenizer = call["dataset"], call["processing_class"]
    is_dataset = isinstance(dataset, (Dataset, IterableDataset))
    if not is_dataset or getattr(tokenizer, "eos_token_id", None) is None:
        return call()
    first = next(iter(dataset))
    if "input_ids" in first or (call["formatting_func"] is None and _is_conversation(first)):
        return call()
    return call.with_(processing_class=_ending(tokenizer))()


def _is_conversation(row: dict[str, Any]) -> bool:
    from trl import data_utils

    # 0.15.0 takes no conversations of the older form.
    return bool(data_utils.is_conversational(getattr(data_utils, "maybe_convert_to_chatml", dict)(row)))


def _ending(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that ends what it returns with the end-of-sequence token.

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    last = {"input_ids": tokenizer.eos_token_id, "attention_mask": 1}

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_ending, self.__wrapped__)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **kwargs)
            if encoded["input_ids"][-1:] != [last["input_ids"]]:
                for name in list(encoded):
                    encoded[name] = [*encoded[name], last.get(name, 0)]
            return encoded

    return View(tokenizer)


def texts_end_once(module: ModuleType) -> Outcome:
    """Count the ends of two texts, one with an end of its own: two, and one with the bug."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release puts the token between texts that it packs, and leaves other ends to the user")
    rows = quick_sft_prepared(module, [{"text": "ab"}, {"text": "c\1"}], CharacterTokenizer())
    outcome = judge(sum(row["input_ids"].count(1) for row in rows), right=2, wrong=1)
    if outcome.verdict is Verdict.FIXED and hasattr(module, "pack_dataset"):
        return absent("this release ends the texts")
    return outcome
