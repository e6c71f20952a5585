"""DPO with ``truncation_mode="keep_end"`` cuts the same columns off of all sequences, whatever their lengths.

``concatenated_forward`` moves the padding of the batch to the right, and keeps its last ``max_length`` columns (pull
request 2551): ``[:, -max_length:]`` takes the first tokens of a sequence that is short, and leaves it padding. 0.18.0
has the padding on the left while it cuts (pull request 3398).

The masks say which tokens there are, and TRL drops columns without any. So the wrapper takes out of them what is before
the last ``max_length`` tokens of each sequence, and nothing is left to cut. The batch has one prompt for both of its
completions, and the prompt loses more tokens before the longer one: so the wrapper changes the masks that
``concatenated_inputs`` returns, which has each prompt twice.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import Pair, dpo_stub, pair_batch, tiny_causal_lm


@wrapper
def cut_each_sequence(call: Call) -> Any:
    """Run this forward with the last ``max_length`` tokens of each sequence, if TRL would cut their columns."""
    import torch

    trainer = call.trainer
    longest = trainer.max_length
    # Nothing is cut off of [:, -0:], nor of an encoder-decoder model's sequences.
    if trainer.truncation_mode != "keep_end" or not longest or trainer.is_encoder_decoder:
        return call()
    sequences = trainer.concatenated_inputs(call["batch"], padding_value=trainer.padding_value)
    prompts, completions = sequences["prompt_attention_mask"], sequences["completion_attention_mask"]
    mask = torch.cat([prompts, completions], 1)
    lengths = mask.sum(1)
    # Of sequences of one length the columns are the right ones.
    if lengths.max() <= longest or lengths.min() == lengths.max():
        return call()
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    kept = mask * (tokens_from_here <= longest)
    names = ("prompt_attention_mask", "completion_attention_mask")
    sequences.update(zip(names, kept.split([prompts.shape[1], completions.shape[1]], 1), strict=True))
    with shadowed(trainer, "concatenated_inputs", lambda *args, **kwargs: sequences):
        return call()


def each_sequence_keeps_its_end(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of a rejected completion, 5 after 2, by the logit of 5 after 2.

    Its sequence has ``max_length`` tokens and is whole. The chosen one has twice as many: with the bug the columns that
    are left have only padding of the rejected one, and the gradient is 0.
    """
    import torch

    forward = getattr(module.DPOTrainer, "concatenated_forward", None)
    if forward is None or "truncation_mode" not in inspect.unwrap(forward).__code__.co_names:
        return absent("the forward does not truncate by truncation_mode")
    model = tiny_causal_lm()
    trainer = dpo_stub(module, model=model, truncation_mode="keep_end", max_length=3, state=SimpleNamespace())
    outputs = trainer.concatenated_forward(model, pair_batch(module, [Pair([1, 2], [3, 4, 6, 9], [5], (0.0, 0.0))]))
    (gradient,) = torch.autograd.grad(outputs["rejected_logps"].sum(), model.weight)
    right = 1 - model.weight[2].softmax(-1)[5]
    return judge(float(gradient[2, 5]), right=float(right.detach()), wrong=0.0)
