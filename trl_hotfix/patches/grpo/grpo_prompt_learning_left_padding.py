"""GRPO and RLOO count the padding between a soft prompt of PEFT and a prompt that is padded on the left.

PEFT puts virtual tokens, or a cache of keys and values, before each row. The padding of a short prompt is then between
the two. PEFT takes no ``position_ids`` for such a model: it sets them to None, with a warning, and the model counts all
columns. That is so where TRL samples completions as well as where it scores them. Even with rotary positions a prompt
is then farther from the virtual tokens, the longer the other prompts of its batch are.

The mask that PEFT gives the model has the virtual tokens. A hook of the model counts by it. PEFT 0.21 counts right
where it generates with a prefix, and not where it trains one: positions that it gives are left alone.

A reference without the adapter is called past the hook, and has no virtual tokens.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer, trainer_and_config


@wrapper
def count_positions_from_the_soft_prompt(call: Call) -> Any:
    """Have the model beneath a soft prompt count positions by its mask, while it samples or scores."""
    model = call.trainer.accelerator.unwrap_model(call.trainer.model)
    if not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return call()
    base = model.get_base_model()
    # A model for images has positions of another shape, and some models take no positions.
    if base.config.get_text_config() is not base.config or not _takes_positions(base):
        return call()
    call.act()
    with base.register_forward_pre_hook(_give_positions, with_kwargs=True):
        return call()


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _give_positions(model: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """Give the positions ``(rows, columns)`` of what is not in the cache. The padding has that of the token before."""
    mask = inputs.get("attention_mask")
    if inputs.get("position_ids") is not None or mask is None or mask.dim() != 2:
        return None
    embeds = inputs.get("inputs_embeds")
    columns = (inputs["input_ids"] if embeds is None else embeds).shape[1]
    return args, {**inputs, "position_ids": (mask.long().cumsum(1) - 1)[:, -columns:]}


def padding_behind_a_soft_prompt_is_not_counted(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of the third token of a row with a virtual token and a column of padding.

    The logits are the position times a weight of each of two tokens, which is 0. So the gradient by the weight of the
    token is half of the position before it, which is 2, or 3 with the padding.
    """
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    scorers = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
    scorer = next((name for name in scorers if name in vars(trainer_class)), None)
    if scorer is None:
        return absent("this release computes the log-probs elsewhere")
    model = _model_with_a_virtual_token()
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, report_to=[], temperature=1.0),
        model=model,
        model_kwarg_keys={"logits_to_keep"},
        _is_vlm=False,
        # TRL 0.27 labels the timing of the forward with the step, and 1.14 asks for Liger's loss.
        state=SimpleNamespace(global_step=0),
        use_liger_kernel=False,
    )
    trainer.accelerator.autocast = torch.enable_grad
    scored = getattr(trainer, scorer)(model, torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1]]), 1)
    log_probs = scored[0] if isinstance(scored, tuple) else scored
    (gradient,) = torch.autograd.grad(log_probs[0, 0], model.base_model.head)
    return judge(float(gradient[1]), right=1.0, wrong=1.5)


def _model_with_a_virtual_token() -> Any:
    """Return a model of positions beneath PEFT's own prompt tuning. It returns log-probs, as TRL's own head does."""
    import torch
    from peft import PeftModelForCausalLM, PromptTuningConfig

    class Base(torch.nn.Module):  # type: ignore[misc]
        device, prepare_inputs_for_generation = torch.device("cpu"), None

        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(2, 1)
            self.config = SimpleNamespace(to_dict=lambda: {"model_type": "custom"}, vocab_size=2, model_type="custom")
            self.config.get_text_config = lambda: self.config

        def forward(self, inputs_embeds: Any, position_ids: Any = None, logits_to_keep: int = 0, **unused: Any) -> Any:
            positions = torch.arange(inputs_embeds.shape[1])[None] if position_ids is None else position_ids
            logits = (positions[..., None] * self.head)[:, -logits_to_keep:]
            return SimpleNamespace(logits=logits, log_probs=logits[:, :-1].log_softmax(-1)[..., 1])

    sizes = {"num_layers": 1, "num_attention_heads": 1, "token_dim": 1, "num_transformer_submodules": 1}
    with torch.random.fork_rng(devices=[]):
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1, **sizes)
        model = PeftModelForCausalLM(Base(), config)
    model.base_model.head = torch.nn.Parameter(torch.zeros(2))
    return model
