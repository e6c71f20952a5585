"""DPO cuts one column too many off of a batch, and with it the last token of the longest sequence.

``concatenated_forward`` moves the padding of the batch to the right, and keeps ``[:, : first_empty_col - 1]``. If no
column is empty, ``first_empty_col`` is one more than there are (pull request 2332).

The cut is in the middle of the method, where nothing can be changed. So before it the mask counts one token more of the
longest sequence, and TRL cuts off that column. It has an empty column more than there was, since without one the
cut is right. The token ids stay as they are: fewer of their columns are kept than they have.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import Pair, dpo_stub, pair_batch, tiny_causal_lm


@wrapper
def cut_padding_alone(call: Call) -> Any:
    """Run this forward with a mask that counts a token more of the longest sequence, if TRL cuts off its last one."""
    from torch.nn.functional import pad

    trainer = call.trainer
    if trainer.is_encoder_decoder:
        return call()
    sequences = trainer.concatenated_inputs(call["batch"], padding_value=trainer.padding_value)
    prompts, completions = sequences["prompt_attention_mask"], sequences["completion_attention_mask"]
    of_completions = completions.sum(1)
    lengths = prompts.sum(1) + of_completions
    if lengths.max() == prompts.shape[1] + completions.shape[1]:
        return call()
    longest = lengths.argmax()
    mask = sequences["completion_attention_mask"] = pad(completions, (0, 1))
    mask[longest, of_completions[longest]] = 1
    with shadowed(trainer, "concatenated_inputs", lambda *args, **kwargs: sequences):
        return call()


def longest_sequence_keeps_its_end(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of the longest sequence by the logit of its last token, 7 after 9.

    That is 1 - p, and 0 with the bug, which cuts the token off.
    """
    import torch

    inputs = getattr(module.DPOTrainer, "concatenated_inputs", None)
    if inputs is None or "label_pad_token_id" in inspect.signature(inputs).parameters:
        return absent("the forward moves no padding: a batch has whole sequences")
    model = tiny_causal_lm()
    pairs = Pair([1, 2], [3, 4, 9, 7], [5, 6], (0.0, 0.0)), Pair([2, 5, 6], [7], [1, 3], (0.0, 0.0))
    log_probs = dpo_stub(module, model=model).concatenated_forward(model, pair_batch(module, pairs))["chosen_logps"]
    (gradient,) = torch.autograd.grad(log_probs[0], model.weight)
    right = 1 - model.weight[9].softmax(-1)[7]
    return judge(float(gradient[9, 7]), right=float(right.detach()), wrong=0.0)
