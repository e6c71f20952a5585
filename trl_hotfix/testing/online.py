"""Stand-ins for the trainers that generate a pair of completions and have it judged: OnlineDPO, XPO and NashMD."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from .models import tiny_causal_lm
from .trainers import default_arguments, stub_trainer


def online_dpo_stub(module: ModuleType, completions: Any = None, completion_mask: Any = None, **settings: Any) -> Any:
    """Return a stub of this module's trainer (OnlineDPO, XPO, NashMD) whose ``training_step`` runs from 0.12.0 on.

    ``trainer.training_step(trainer.model, {"prompt": [...]})`` samples nothing. OnlineDPO's ``completions`` are given
    with their mask, each of shape ``(2 * prompts, length)``, and the log-probs are those of a ``tiny_causal_lm``. In
    the other two trainers only the code after the loss is the real one, and the loss is 2. The judge prefers the first
    completion; the reference is the model at half its weights. The losses that ``accelerator.backward`` is called with
    are appended to ``trainer.went_backward``. ``settings`` are of the trainer's arguments.
    """
    import torch

    kind = {"xpo_trainer": "XPO", "nash_md_trainer": "NashMD"}.get(module.__name__.rpartition(".")[2], "OnlineDPO")
    trainer_class = getattr(module, f"{kind}Trainer")
    defaults = {"n_gpu": 1, "use_vllm": True, "missing_eos_penalty": None}
    args = default_arguments(getattr(module, f"{kind}Config"), **{**defaults, **settings})
    config = SimpleNamespace(is_encoder_decoder=False)
    model, reference = tiny_causal_lm(config), tiny_causal_lm(config)
    with torch.no_grad():
        reference.weight.mul_(0.5)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]]) if completions is None else completions
    mask = torch.ones_like(tokens) if completion_mask is None else completion_mask
    prompts = torch.tensor([[7, 8]]).repeat(len(tokens) // 2, 1)
    prompts_twice = prompts.repeat(2, 1)
    model.generate = lambda *args, **kwargs: torch.cat([prompts_twice, tokens], dim=1)
    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=9, batch_decode=lambda ids, **kwargs: ["w"] * len(ids))
    judge = SimpleNamespace(judge=lambda prompts, completions, **kwargs: [0] * len(prompts))
    trainer = stub_trainer(
        trainer_class,
        args,
        model=model,
        ref_model=reference,
        judge=judge,
        reward_model=None,
        # From 0.22.0 on reward functions come before the judge, and from 1.1.0 on there is no judge.
        reward_funcs=[len] if hasattr(trainer_class, "_calculate_rewards_from_functions") else None,
        _calculate_rewards_from_functions=lambda **kwargs: torch.arange(len(tokens), 0.0, -1),
        _beta=0.1,
        _alpha=0.1,
        _mixture_coef=0.5,
        stats=defaultdict(list),
        state=SimpleNamespace(global_step=0, epoch=0.0),
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        eos_token_id=0,
        eos_token_ids=[0],
        pad_token_id=9,
        max_length=64,
        is_vision_model=False,
        generation_config=None,
        use_apex=False,
        went_backward=[],
        tokenize_row=lambda *args: None,
        data_collator=lambda rows: {"prompt_input_ids": prompts, "prompt_attention_mask": torch.ones_like(prompts)},
        _prepare_inputs=lambda inputs: inputs,
    )
    one_device = {
        "state": SimpleNamespace(deepspeed_plugin=None),
        "distributed_type": "NO",
        "gradient_accumulation_steps": 1,
    }
    vars(trainer.accelerator).update(one_device, backward=lambda loss, **kwargs: trainer.went_backward.append(loss))
    if kind == "OnlineDPO":
        # The generation with vLLM returns four values; that without returns four, in 1.16.0 five.
        trainer._generate_vllm = lambda *args: (prompts_twice, torch.ones_like(prompts_twice), tokens, mask)
        return trainer
    unit_values = torch.ones(len(prompts))
    log_probs = torch.zeros(len(prompts), 3)
    trainer._generate_completions = trainer._process_completions = lambda *args: ({}, {})
    trainer._compute_rewards = lambda *args: (unit_values, unit_values)
    trainer._compute_judge = lambda *args: unit_values > 0
    trainer._compute_logprobs = lambda *args: (log_probs,) * (4 if kind == "XPO" else 2)
    trainer._compute_losses = lambda *args: (2.0 * model.weight.sum() / model.weight.sum(), unit_values, unit_values)
    trainer._log_statistics = lambda *args: None
    return trainer
