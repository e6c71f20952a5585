"""DPO with ``padding_free=True`` passes one row of many sequences to models that do not separate them.

``concatenated_forward`` flattens the chosen and the rejected sequences of a batch to shape ``(1, sum of the lengths)``,
with ``position_ids`` that start again at 0 with each sequence and no attention mask (TRL pull request 2520). TRL only
warns. The attention decides whether the sequences stay apart:

- FlashAttention takes the sequence borders from the ``position_ids`` (transformers pull request 31629).
- sdpa, eager and flex do so from transformers 4.53 on (``masking_utils.find_packed_sequence_indices``), in models that
  build their mask there, and only where no cache is made. DPO passes ``use_cache=False`` from 0.18.0 on.

A block-diagonal mask would keep the row, but its size is the square of the flattened length, every implementation needs
another format and the auxiliary loss of mixture-of-experts models cannot read any. So TRL's own code pads the batch
instead, as every release from 0.29.0 on does with any ``padding_free=True``. The reference's forwards go through
``concatenated_forward`` too, also those of ``precompute_ref_log_probs``.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, WarnOnce, judge, shadowed, why_sequences_mix, wrapper
from ...model import Outcome
from ...testing import Pair, absent_if_never_flattened, dpo_stub, pair_batch, recorded_warnings, tiny_causal_lm

_warn = WarnOnce()


@wrapper
def pad_what_the_model_would_mix(call: Call) -> Any:
    """Run this forward with padding, unless the model keeps the sequences of a flattened batch apart."""
    trainer = call.trainer
    # The batch of an encoder-decoder model is never flattened.
    if not trainer.padding_free or trainer.is_encoder_decoder:
        return call()
    plain = trainer.accelerator.unwrap_model(call["model"])
    # 0.18.0 brought both this parameter and use_cache=False.
    reason = why_sequences_mix(plain, no_cache="is_ref_model" in inspect.signature(call).parameters)
    if reason is None:
        return call()
    _warn(
        trainer,
        "padding_free=True, but the sequences of a flattened batch would attend to one another: %s. The batches "
        "are padded instead, as with padding_free=False, and so are the results. To keep padding_free, load the "
        "model and the reference in half precision on a GPU with attn_implementation='flash_attention_2' (in "
        "model_init_kwargs and ref_model_init_kwargs if the trainer loads them). Recurrent layers and prompt "
        "tuning cannot have it",
        reason,
    )
    with shadowed(trainer, "padding_free", False):
        return call()


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of a rejected completion, 4 after 1 and 2, by the logit of 4 after 2.

    The model attends to the whole row, with keys that are all equal: its logits are the mean of those of the tokens up
    to here. Right is a mean of the two tokens of the prompt, wrong one of the chosen sequence, 1, 2 and 3, as well.
    """
    import torch

    if absence := absent_if_never_flattened(module):
        return absence
    model = tiny_causal_lm()

    def attend_to_all(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        mask = kwargs.get("attention_mask", torch.ones_like(args[0]))[..., None]
        outputs.logits = (outputs.logits * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)

    model.register_forward_hook(attend_to_all, with_kwargs=True)
    trainer = dpo_stub(module, model=model, padding_free=True, label_pad_token_id=-100, state=SimpleNamespace())
    with recorded_warnings():
        outputs = trainer.concatenated_forward(model, pair_batch(module, [Pair([1, 2], [3], [4], (0.0, 0.0))]))
    (gradient,) = torch.autograd.grad(outputs["rejected_logps"].sum(), model.weight)

    def expected(tokens: list[int]) -> float:
        return float((1 - model.weight[tokens].mean(0).softmax(-1)[4]).detach()) * tokens.count(2) / len(tokens)

    return judge(float(gradient[2, 4]), right=expected([1, 2]), wrong=expected([1, 2, 3, 1, 2]))
