"""transformers 5.10.1 and later counts the first tokens of GPT-2, whose class has no name of a loss in its own name.

``Trainer`` leaves first tokens out of ``num_items_in_batch`` if ``loss_type`` names the loss of causal models. A model
takes its ``loss_type`` from the name of its class, and ``GPT2LMHeadModel`` gets None, for which ``loss_function`` falls
back to the loss of causal models. ``Trainer.__init__`` keeps its answer in ``_loss_shifts_labels``.

The self-test asks as that constructor does, which would set up devices.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, virtual_tokens_come_first, wrapper
from ...model import Outcome
from ...testing import stub_trainer


@wrapper
def count_no_first_tokens(call: Call) -> Any:
    """Count the labels of a step without those of first tokens, if the loss has no term for these."""
    trainer = call.trainer
    if trainer._loss_shifts_labels or not _predicts_no_first_token(trainer):
        return call()
    with shadowed(trainer, "_loss_shifts_labels", True):
        count = call()
    # Where no row has a second token the loss is 0, and not 0 / 0.
    return None if count is None else count + (count == 0)


def _predicts_no_first_token(trainer: Any) -> bool:
    """Return whether the loss is transformers' for causal models, or TRL's, and no virtual token is before a row."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    # A PEFT model has the loss function and the config of its base model.
    model, loss_func = trainer.model, trainer.compute_loss_func
    return (
        getattr(model, "loss_function", None) is ForCausalLMLoss
        and not model.config.is_encoder_decoder
        and not virtual_tokens_come_first(model)
        and (loss_func is None or getattr(loss_func, "__module__", "").startswith("trl."))
    )


def first_tokens_of_gpt2_are_not_counted(module: ModuleType) -> Outcome:
    """Count the labels of a step of two rows: seven are no padding, and five of these have a token before them."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if "_loss_shifts_labels" not in inspect.unwrap(Trainer.__init__).__code__.co_names:
        return absent("this transformers counts all first tokens")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=1, n_positions=1, n_embd=1, n_layer=0, n_head=1))
    trainer = stub_trainer(
        module.SFTTrainer,
        SimpleNamespace(average_tokens_across_devices=False, world_size=1, n_gpu=1),
        model=model,
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        _loss_shifts_labels=LOSS_MAPPING.get(model.loss_type) is ForCausalLMLoss,
        get_tp_size=lambda: 1,
        get_cp_size=lambda: 1,
        get_sp_size=lambda: 1,
    )
    step = [{"labels": torch.tensor([[5, 6, 7, 8], [9, 5, 6, -100]])}]
    return judge(float(trainer._get_num_items_in_batch(step, "cpu")), right=5.0, wrong=7.0)
