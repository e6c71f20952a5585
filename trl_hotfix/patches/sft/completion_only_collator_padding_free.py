"""``DataCollatorForCompletionOnlyLM(padding_free=True)`` flattens batches for models that mix their sequences.

TRL 0.10.1 (pull request 1887) let this collator flatten a batch to shape ``(1, sum of the lengths)``, with
``position_ids`` that start again at 0 with each sequence and no attention mask. 0.20.0 removed the collator (pull
request 3704). The collator does not know the model, and the trainer does not look at the collator.

The target is the trainer's constructor, because it has both. The collator's ``padding_free`` is switched off
permanently, so later copies of the collator and methods bound to it pad as well. A padded batch holds the sequences
and labels of the flattened one.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, why_sequences_mix, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    as_tokenizer_of,
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
    tiny_causal_lm,
)

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


@wrapper
def pad_what_the_model_would_mix(call: Call) -> Any:
    """Switch ``padding_free`` of the collator off, unless the model keeps the sequences of a flattened batch apart."""
    result, trainer = call(), call.trainer
    collator: Any = trainer.data_collator
    class_names = {base.__name__ for base in type(collator).__mro__}
    if "DataCollatorForCompletionOnlyLM" not in class_names or not getattr(collator, "padding_free", False):
        return result
    reason = why_sequences_mix(trainer.model)
    if reason is None:
        return result
    collator.padding_free = False
    call.act()
    if _first_warning(trainer):
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


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """Differentiate the loss of two sequences by the logit of label 5, of token 2 in the second sequence.

    The logits of the model are means over the tokens that it attends to, like an attention whose keys are all equal.
    Of the tokens 2 and 9 before the label the derivative is ``(p - 1) / 2``. With the bug it is ``(p - 1) / 5``, since
    the model also sees the three tokens of the first sequence.
    """
    import torch
    from trl.trainer import utils

    collator_class = getattr(utils, "DataCollatorForCompletionOnlyLM", None)
    if collator_class is None:
        return absent("there is no DataCollatorForCompletionOnlyLM")
    tokenizer, lm = CharacterTokenizer(), tiny_causal_lm()
    collator = collator_class(response_template=[9], tokenizer=tokenizer)
    if not hasattr(collator, "padding_free"):
        return absent("DataCollatorForCompletionOnlyLM has no padding_free")
    collator.padding_free = True

    class Mean(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="tiny", _attn_implementation="sdpa")

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return (lm.weight[input_ids] * mask[..., None]).cumsum(1) / mask.cumsum(1)[..., None]

    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, "completion_only_loss": False}
    with recorded_warnings(), single_process(module):
        trainer = constructed(
            module.SFTTrainer,
            model=Mean(),
            args=default_arguments(module.SFTConfig, **settings),
            data_collator=collator,
            **as_tokenizer_of(module.SFTTrainer, tokenizer),
        )
    batch = trainer.data_collator([{"input_ids": row, "attention_mask": [1] * 3} for row in ([3, 9, 7], [2, 9, 5])])
    logits, labels = trainer.model(batch["input_ids"], batch.get("attention_mask"))[:, :-1], batch["labels"][:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, lm.weight)
    right, wrong = (
        (float(lm.weight[seen].detach().mean(0).softmax(-1)[5]) - 1) / len(seen) for seen in ([2, 9], [3, 9, 7, 2, 9])
    )
    return judge(float(gradient[2, 5]), right=right, wrong=wrong, rows=len(batch["input_ids"]))
