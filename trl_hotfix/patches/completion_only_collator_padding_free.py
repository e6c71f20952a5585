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
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, judge, shadowed, why_sequences_mix
from ..model import Outcome
from ..testing import default_arguments, tiny_causal_lm

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


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
    if instance not in _warned:
        _warned.add(instance)
        logging.getLogger("trl_hotfix").warning(
            "%s(padding_free=True), but the sequences of a flattened batch would attend to one another: %s. Its "
            "padding_free is switched off: the batches are padded, and right. To keep padding_free, load the model in "
            "half precision on a GPU with attn_implementation='flash_attention_2': an argument of from_pretrained, or "
            "an entry of SFTConfig(model_init_kwargs=...) if the trainer loads the model by name. In ModelConfig "
            "alone it does nothing. Recurrent layers and prompt tuning cannot have it",
            type(collator).__name__,
            reason,
        )
    return result


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """Construct a trainer with such a collator and measure the loss of its batch in a model that mixes sequences.

    The logits of the model are a mean over the tokens that it attends to, which is an attention whose keys are all
    equal: ``logits[t] = mean over s <= t of W[input_ids[s]]``. Like any model that builds its mask itself, it attends
    to the whole row unless the attention mask excludes tokens. The right loss is that of each sequence alone, the wrong
    one is that of all of them in one row. SFTTrainer's constructor is the real one; transformers' constructor is
    replaced.
    """
    import torch
    from transformers import Trainer
    from trl.trainer import utils

    collator_class = getattr(utils, "DataCollatorForCompletionOnlyLM", None)
    if collator_class is None:
        return absent("there is no DataCollatorForCompletionOnlyLM")

    tokenizer = _Tokenizer()
    template = 9
    collator = collator_class(response_template=[template], tokenizer=tokenizer)
    if not hasattr(collator, "padding_free"):
        return absent("DataCollatorForCompletionOnlyLM has no padding_free")
    collator.padding_free = True

    class StubTrainer(Trainer):  # type: ignore[misc]
        """Stand after SFTTrainer in the method resolution order and replace the constructor of transformers."""

        def __init__(self, **arguments: Any) -> None:
            self.__dict__.update(arguments)
            self.callback_handler = SimpleNamespace(callbacks=[])

    class Mean(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="tiny", _attn_implementation="sdpa")

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return (lm(input_ids).logits * mask[..., None]).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]

    def summed_loss(batch: Any) -> float:
        labels = batch["labels"][:, 1:]
        with torch.no_grad():
            log_probs = Mean()(batch["input_ids"], batch.get("attention_mask"))[:, :-1].log_softmax(-1)
        label_log_probs = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return -float(label_log_probs[labels != -100].sum())

    def one_row(*sequences: list[int]) -> dict[str, Any]:
        token_ids = [token for sequence in sequences for token in sequence]
        labels: list[int] = []
        for sequence in sequences:
            prompt_length = sequence.index(template) + 1
            labels += [-100] * prompt_length + sequence[prompt_length:]
        return {"input_ids": torch.tensor([token_ids]), "labels": torch.tensor([labels])}

    lm = tiny_causal_lm()
    rows = [[3, 5, template, 7, 4], [2, 6, 8, 2, template, 10, 5, 1], [4, template, 6]]
    dataset_kwargs = {"skip_prepare_dataset": True}
    args = default_arguments(module.SFTConfig, dataset_kwargs=dataset_kwargs, completion_only_loss=False)
    trainer: Any = object.__new__(type("SFTTrainer", (module.SFTTrainer, StubTrainer), {}))
    # This trainer is no user's, so the wrapper must not warn about it.
    _warned.add(trainer)
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    tokenizer_argument = {"processing_class" if "processing_class" in parameters else "tokenizer": tokenizer}
    with shadowed(module, "PartialState", _single_process_state(getattr(module, "PartialState", None))):
        module.SFTTrainer.__init__(trainer, model=Mean(), args=args, data_collator=collator, **tokenizer_argument)
    batch = trainer.data_collator([{"input_ids": row} for row in rows])
    return judge(
        summed_loss(batch),
        right=sum(summed_loss(one_row(row)) for row in rows),
        wrong=summed_loss(one_row(*rows)),
        rows=len(batch["input_ids"]),
        labels=int((batch["labels"] != -100).sum()),
    )


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
