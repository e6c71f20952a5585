"""``DataCollatorForCompletionOnlyLM(padding_free=True)``: one long row, whatever attention the model has.

TRL 0.10.1 (pull request 1887) let this collator flatten a batch to shape ``(1, sum of the lengths)``, with
``position_ids`` that start again at 0 with each sequence and no attention mask; 0.20.0 removed the collator (pull
request 3704). Only FlashAttention takes the borders from the position ids always. With sdpa and eager the sequences
attend to one another, and nothing says so: neither the collator, which does not know the model, nor the trainer, which
does not look at the collator. In issue 2834 FlashAttention had been asked for in ``ModelConfig``, which nothing passed
on to ``from_pretrained``. transformers from 4.53 on separates the sequences for sdpa and eager too, but not while the
model makes a KV cache: not by default, and with gradient checkpointing in training but not in evaluation.

The trainer knows both, so its constructor is where they are looked at together. A collator whose batches this model
would mix is told to pad: what it then makes, labels included, is the batch that it flattened. It is told for good, so
what has been bound to it or copied from it later pads as well.

Out of reach: the collator without ``SFTTrainer``, and one that is put into the trainer afterwards.
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

from ..authoring import absent, judge, shadowed, why_sequences_mix
from ..model import Outcome
from ..stubs import default_arguments, tiny_causal_lm

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def pad_what_the_model_would_mix(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Switch ``padding_free`` of the collator off, unless the model keeps the sequences of a flattened batch apart."""
    result = wrapped(*args, **kwargs)
    collator: Any = instance.data_collator
    kinds = {each.__name__ for each in type(collator).__mro__}
    if "DataCollatorForCompletionOnlyLM" not in kinds or not getattr(collator, "padding_free", False):
        return result
    why = why_sequences_mix(instance.model)
    if why is None:
        return result
    collator.padding_free = False
    if instance not in _warned:
        _warned.add(instance)
        logging.getLogger("trl_hotfix").warning(
            "%s(padding_free=True), but the sequences of a flattened batch would attend to one another: %s. Its "
            "padding_free is switched off: the batches are padded, and right. To keep padding_free, load the model in "
            "half precision on a GPU with attn_implementation='flash_attention_2': an argument of from_pretrained, or "
            "an entry of SFTConfig(model_init_kwargs=...) if the trainer loads the model by name. In ModelConfig "
            "alone it does nothing. Recurrent layers and prompt tuning cannot have it",
            type(collator).__name__,
            why,
        )
    return result


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """A trainer is made with such a collator: what is the loss of its batch in a model that has no borders?

    The logits of the model are a mean over the tokens that it sees, which is what an attention is that finds all keys
    equal: ``logits[t] = mean over s <= t of W[input_ids[s]]``. Like any model that builds its mask itself, it sees the
    whole row unless the attention mask says otherwise. Right is each sequence alone, wrong is all of them in one row.
    The constructor is the real one, transformers' beneath it is not.
    """
    import torch
    from transformers import Trainer
    from trl.trainer import utils

    collator_class = getattr(utils, "DataCollatorForCompletionOnlyLM", None)
    if collator_class is None:
        return absent("there is no DataCollatorForCompletionOnlyLM")

    words = _Tokenizer()
    template = 9
    collator = collator_class(response_template=[template], tokenizer=words)
    if not hasattr(collator, "padding_free"):
        return absent("DataCollatorForCompletionOnlyLM has no padding_free")
    collator.padding_free = True

    class Given(Trainer):  # type: ignore[misc]
        """Beneath SFTTrainer in the order of its bases, in the place of transformers' own."""

        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)
            self.callback_handler = SimpleNamespace(callbacks=[])

    class Mean(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="tiny", _attn_implementation="sdpa")

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return (lm(input_ids).logits * seen[..., None]).cumsum(1) / seen.cumsum(1).clamp(min=1)[..., None]

    def summed_loss(batch: Any) -> float:
        labels = batch["labels"][:, 1:]
        with torch.no_grad():
            log_probs = Mean()(batch["input_ids"], batch.get("attention_mask"))[:, :-1].log_softmax(-1)
        its = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return -float(its[labels != -100].sum())

    def one_row(*sequences: list[int]) -> dict[str, Any]:
        ids = [token for each in sequences for token in each]
        labels: list[int] = []
        for each in sequences:
            prompt = each.index(template) + 1
            labels += [-100] * prompt + each[prompt:]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}

    lm = tiny_causal_lm()
    rows = [[3, 5, template, 7, 4], [2, 6, 8, 2, template, 10, 5, 1], [4, template, 6]]
    dataset_kwargs = {"skip_prepare_dataset": True}
    args = default_arguments(module.SFTConfig, dataset_kwargs=dataset_kwargs, completion_only_loss=False)
    trainer: Any = object.__new__(type("SFTTrainer", (module.SFTTrainer, Given), {}))
    _warned.add(trainer)  # nobody's run
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    tokenizer = "processing_class" if "processing_class" in parameters else "tokenizer"
    with shadowed(module, "PartialState", _alone(getattr(module, "PartialState", None))):
        module.SFTTrainer.__init__(trainer, model=Mean(), args=args, data_collator=collator, **{tokenizer: words})
    batch = trainer.data_collator([{"input_ids": row} for row in rows])
    return judge(
        summed_loss(batch),
        right=sum(summed_loss(one_row(row)) for row in rows),
        wrong=summed_loss(one_row(*rows)),
        rows=len(batch["input_ids"]),
        labels=int((batch["labels"] != -100).sum()),
    )


def _alone(real: Any) -> Callable[[], Any]:
    """accelerate's ``PartialState`` for this thread: the real one would join the ranks of a run before its time."""
    here = threading.get_ident()
    return lambda: SimpleNamespace(local_main_process_first=nullcontext) if threading.get_ident() == here else real()


class _Tokenizer:
    """What the collator and the constructor ask of one. Token 0 is the padding."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "<eos>", 1
    padding_side = "right"
    model_max_length = 32

    def pad(self, examples: list[dict[str, list[int]]], **kwargs: Any) -> dict[str, Any]:
        import torch

        longest = max(len(each["input_ids"]) for each in examples)
        ids = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in examples]
        return {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) != 0).long()}
