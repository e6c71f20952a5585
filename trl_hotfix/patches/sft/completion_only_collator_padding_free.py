"""``DataCollatorForCompletionOnlyLM(padding_free=True)`` flattens batches for models that mix their sequences.

TRL 0.10.1 (pull request 1887) let this collator flatten a batch to shape ``(1, sum of the lengths)``, with
``position_ids`` that start again at 0 with each sequence and no attention mask. 0.20.0 removed the collator (pull
request 3704). The collator does not know the model, and the trainer does not look at the collator.

The target is the trainer's constructor, because it has both. The collator's ``padding_free`` is switched off
permanently, so later copies of the collator and methods bound to it pad as well. A padded batch holds the sequences
and labels of the flattened one.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, act, judge, shadowed, why_sequences_mix
from ...model import Outcome, Verdict
from ...testing import default_arguments, tiny_causal_lm

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


def pad_what_the_model_would_mix(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Switch ``padding_free`` of the collator off, unless the model keeps the sequences of a flattened batch apart."""
    result = wrapped(*args, **kwargs)
    collator: Any = instance.data_collator
    class_names = {base.__name__ for base in type(collator).__mro__}
    if "DataCollatorForCompletionOnlyLM" not in class_names or not getattr(collator, "padding_free", False):
        return result
    reason = why_sequences_mix(instance.model)
    if reason is None:
        return result
    collator.padding_free = False
    act()
    if _first_warning(instance):
        _log.warning(
            "%s(padding_free=True), but the sequences of a flattened batch would attend to one another: %s. Its "
            "padding_free is switched off: the batches are padded, and right. To keep padding_free, load the model in "
            "half precision on a GPU with attn_implementation='flash_attention_2': an argument of from_pretrained, or "
            "an entry of SFTConfig(model_init_kwargs=...) if the trainer loads the model by name. In ModelConfig "
            "alone it does nothing. Recurrent layers and prompt tuning cannot have it",
            type(collator).__name__,
            reason,
        )
    return result


_TEMPLATE = 9
_ROWS = [[3, 5, _TEMPLATE, 7, 4], [2, 6, 8, 2, _TEMPLATE, 10, 5, 1], [4, _TEMPLATE, 6]]


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """Construct trainers with such a collator and measure the loss of its batch in a model that mixes sequences.

    The logits of the model are a mean over the tokens that it attends to, which is an attention whose keys are all
    equal: ``logits[t] = mean over s <= t of W[input_ids[s]]``. Like any model that builds its mask itself, it attends
    to the whole row unless the attention mask excludes tokens. The right loss is that of each sequence alone, the wrong
    one is that of all of them in one row. SFTTrainer's constructor is the real one; transformers' constructor is
    replaced.
    """
    from trl.trainer import utils

    collator_class = getattr(utils, "DataCollatorForCompletionOnlyLM", None)
    if collator_class is None:
        return absent("there is no DataCollatorForCompletionOnlyLM")
    if not hasattr(_collator(collator_class), "padding_free"):
        return absent("DataCollatorForCompletionOnlyLM has no padding_free")
    model = _mean_of_the_row()
    # This trainer is no user's, so the wrapper must not warn about it.
    trainer = _trainer(module)
    _first_warning(trainer)
    _construct(trainer, model, _collator(collator_class, padding_free=True))
    batch = trainer.data_collator(_examples())
    outcome = judge(
        _summed_loss(model, batch),
        right=sum(_summed_loss(model, _one_row(row)) for row in _ROWS),
        wrong=_summed_loss(model, _one_row(*_ROWS)),
        rows=len(batch["input_ids"]),
        labels=int((batch["labels"] != -100).sum()),
    )
    if outcome.verdict is Verdict.FIXED and (mistakes := _mistakes_elsewhere(module, collator_class)):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType, collator_class: Any) -> list[str]:
    """Return what is wrong with other models and collators, and with what is said of them."""
    import transformers

    class Subclass(collator_class):  # type: ignore[misc]
        pass

    class Other:
        padding_free = True

        def __call__(self, examples: Any) -> dict[str, Any]:
            return {"input_ids": examples[:1]}

    flash_separates = hasattr(transformers, "DataCollatorWithFlattening")
    cases = {
        "a second trainer": (_mean_of_the_row(), _collator(collator_class, padding_free=True), True),
        "a model in evaluation": (_mean_of_the_row().eval(), _collator(collator_class, padding_free=True), True),
        "a subclass": (_mean_of_the_row(), _collator(Subclass, padding_free=True), True),
        "FlashAttention": (
            _mean_of_the_row("flash_attention_2"),
            _collator(collator_class, padding_free=True),
            not flash_separates,
        ),
        "another collator": (_mean_of_the_row(), Other(), False),
        "padding": (_mean_of_the_row(), _collator(collator_class), False),
    }
    mistakes: list[str] = []
    for name, (model, collator, is_changed) in cases.items():
        trainer, before = _trainer(module), collator.padding_free
        messages: list[Any] = []
        with shadowed(_log, "warning", lambda *args, messages=messages: messages.append(args)):
            for _ in range(2):
                collator.padding_free = before
                _construct(trainer, model, collator)
        if trainer.data_collator is not collator or collator.padding_free != (before and not is_changed):
            mistakes.append(f"{name}: the collator is {trainer.data_collator}, padding_free={collator.padding_free}")
        if len(messages) != is_changed or (messages and type(collator).__name__ not in messages[0]):
            mistakes.append(f"{name}: of two constructions it is said: {messages}")
        rows = len(collator(_examples())["input_ids"])
        if rows != (1 if collator.padding_free else len(_ROWS)):
            mistakes.append(f"{name}: a batch has {rows} rows")
    own_copy = type(collator_class.__name__, (), {})()
    _construct(_trainer(module), _mean_of_the_row(), own_copy)
    if vars(own_copy):
        mistakes.append(f"a user's copy of an older collator, which cannot flatten, is given {vars(own_copy)}")
    return mistakes


def _collator(collator_class: Any, *, padding_free: bool = False) -> Any:
    collator = collator_class(response_template=[_TEMPLATE], tokenizer=_Tokenizer())
    if padding_free:
        collator.padding_free = True
    return collator


def _trainer(module: ModuleType) -> Any:
    """Return a trainer that is not constructed. ``SFTTrainer`` comes before a stub of transformers' constructor."""
    from transformers import Trainer

    class StubTrainer(Trainer):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            self.__dict__.update(arguments)
            self.callback_handler = SimpleNamespace(callbacks=[])

    trainer_class = type("SFTTrainer", (module.SFTTrainer, StubTrainer), {"module": module})
    return object.__new__(trainer_class)


def _construct(trainer: Any, model: Any, collator: Any) -> None:
    module = trainer.module
    args = default_arguments(
        module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, completion_only_loss=False
    )
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    tokenizer_argument = {"processing_class" if "processing_class" in parameters else "tokenizer": _Tokenizer()}
    with shadowed(module, "PartialState", _single_process_state(getattr(module, "PartialState", None))):
        module.SFTTrainer.__init__(trainer, model=model, args=args, data_collator=collator, **tokenizer_argument)


def _mean_of_the_row(attention: str = "sdpa") -> Any:
    import torch

    lm = tiny_causal_lm()

    class Mean(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="tiny", _attn_implementation=attention)

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return (lm(input_ids).logits * mask[..., None]).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]

    return Mean()


def _examples() -> list[dict[str, list[int]]]:
    return [{"input_ids": row} for row in _ROWS]


def _one_row(*sequences: list[int]) -> dict[str, Any]:
    import torch

    labels: list[int] = []
    for sequence in sequences:
        prompt_length = sequence.index(_TEMPLATE) + 1
        labels += [-100] * prompt_length + sequence[prompt_length:]
    token_ids = [token for sequence in sequences for token in sequence]
    return {"input_ids": torch.tensor([token_ids]), "labels": torch.tensor([labels])}


def _summed_loss(model: Any, batch: Any) -> float:
    import torch

    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        log_probs = model(batch["input_ids"], batch.get("attention_mask"))[:, :-1].log_softmax(-1)
    label_log_probs = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return -float(label_log_probs[labels != -100].sum())


def _single_process_state(real: Any) -> Callable[[], Any]:
    """Replace accelerate's ``PartialState`` in this thread: the real one would initialise a run's ranks too early."""
    thread_id = threading.get_ident()

    def state() -> Any:
        return SimpleNamespace(local_main_process_first=nullcontext) if threading.get_ident() == thread_id else real()

    return state


class _Tokenizer:
    """Have what the collator and the constructor use of a tokenizer. Token 0 is the padding."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "<eos>", 1
    padding_side = "right"
    model_max_length = 32

    def pad(self, examples: list[dict[str, list[int]]], **kwargs: Any) -> dict[str, Any]:
        import torch

        max_length = max(len(example["input_ids"]) for example in examples)
        rows = [example["input_ids"] + [0] * (max_length - len(example["input_ids"])) for example in examples]
        return {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) != 0).long()}
