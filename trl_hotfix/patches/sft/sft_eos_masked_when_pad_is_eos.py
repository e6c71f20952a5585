"""SFT never trains on the end-of-sequence token if it is the padding token too.

The default collator is transformers' ``DataCollatorForLanguageModeling``, which recognises padding by its id: labels
with the id of the padding token become -100. TRL 0.16.1 (pull request 3200) has a collator of its own, which recognises
padding by its position. The wrapper makes the collator that ``SFTTrainer`` has made do the same.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, constructed, default_arguments, single_process, tiny_causal_lm


def learn_the_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the trainer, and let its default collator recognise padding by the ``attention_mask``."""
    from transformers import DataCollatorForLanguageModeling

    wrapped(*args, **kwargs)
    collator = instance.data_collator
    # A subclass, or a collator that was passed, is the user's choice.
    if (
        argument(wrapped, args, kwargs, "data_collator") is not None
        or type(collator) is not DataCollatorForLanguageModeling
    ):
        return
    tokenizer = collator.tokenizer
    if not collator.mlm and tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        # A nested function or another class would fail where worker processes must pickle the collator.
        act()
        collator.torch_call = functools.partial(_labels_of_all_but_padding, collator)


def _labels_of_all_but_padding(collator: Any, examples: list[Any]) -> Any:
    """Return the collator's own batch with labels ``(batch, length)`` that are -100 only on the padding."""
    batch = type(collator).torch_call(collator, examples)
    if "attention_mask" in batch:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def ends_are_labels(module: ModuleType) -> Outcome:
    """Count the end-of-sequence labels in batches of two sequences of trainers with their default collator."""
    if not getattr(module, "DataCollatorForLanguageModeling", module.SFTTrainer).__module__.startswith("transformers."):
        return absent("this release has a collator of its own, which knows padding by its place")
    labels = _labels(_trainer(module).data_collator)
    outcome = judge(float(_ends(labels)), right=2.0, wrong=0.0, labels=labels)
    if outcome.verdict is Verdict.FIXED and (mistakes := _mistakes_elsewhere(module)):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong with a second trainer, with batches of other kinds, and with collators that are to stay."""
    from transformers import DataCollatorForLanguageModeling

    second = _trainer(module, training=False).data_collator
    mistakes = []
    # Padding is not a label, though it has the id of the end.
    expected = [[97, 1, -100, -100], [97, 98, 99, 1]]
    if any(_labels(second) != expected for _ in range(2)):
        mistakes.append(f"the labels are {_labels(second)}: expected {expected}")
    try:
        pickle.dumps(second.torch_call.func)
    except (AttributeError, pickle.PicklingError) as error:
        mistakes.append(f"a worker process cannot have the collator: {error}")

    class OwnCollator(DataCollatorForLanguageModeling):  # type: ignore[misc]
        pass

    words = _tokenizer()
    passed = DataCollatorForLanguageModeling(tokenizer=words, mlm=False)
    left_alone = {
        "a collator that is passed": _trainer(module, data_collator=passed),
        "padding of its own": _trainer(module, tokenizer=CharacterTokenizer()),
        "neither token": _trainer(module, tokenizer=_tokenizer(None)),
    }
    for name, replacement in {"a subclass": OwnCollator, "masked words": _of_masked_words}.items():
        with shadowed(module, "DataCollatorForLanguageModeling", replacement):
            left_alone[name] = _trainer(module)
    mistakes += [f"{name}: the collator is changed" for name, trainer in left_alone.items() if _is_changed(trainer)]
    with_mask = words.pad
    words.pad = lambda *args, **kwargs: {"input_ids": with_mask(*args, **kwargs)["input_ids"]}
    if _ends(_labels(_trainer(module, tokenizer=words).data_collator)):
        mistakes.append("without an attention mask, the labels are changed")
    return mistakes


def _tokenizer(pad_token_id: int | None = 1) -> Any:
    """Return a tokenizer whose padding token is the end of sequence, or which has neither."""
    tokenizer: Any = CharacterTokenizer()
    tokenizer.pad_token, tokenizer.pad_token_id = tokenizer.eos_token, pad_token_id
    tokenizer.eos_token_id = pad_token_id
    return tokenizer


def _of_masked_words(tokenizer: Any, **kwargs: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    collator.mlm = True
    return collator


def _trainer(module: ModuleType, *, tokenizer: Any = None, training: bool = True, **arguments: Any) -> Any:
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    tokenizer_argument = "processing_class" if "processing_class" in parameters else "tokenizer"
    model = tiny_causal_lm(SimpleNamespace(_name_or_path="tiny", _attn_implementation="eager")).train(training)
    args = default_arguments(module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, dataset_text_field="text")
    arguments |= {"model": model, "args": args, tokenizer_argument: tokenizer or _tokenizer()}
    with single_process(module):
        return constructed(module.SFTTrainer, **arguments)


def _is_changed(trainer: Any) -> bool:
    return "torch_call" in vars(trainer.data_collator)


def _labels(collator: Any) -> list[list[int]]:
    examples = [CharacterTokenizer()(text) for text in ("a\1", "abc\1")]
    labels: list[list[int]] = collator(examples)["labels"].tolist()
    return labels


def _ends(labels: list[list[int]]) -> int:
    return sum(row.count(1) for row in labels)
