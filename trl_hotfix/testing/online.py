"""Stand-ins for the trainers that generate and judge: OnlineDPO, XPO, NashMD and A2PO."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from .generation import stub_that_generates
from .models import tiny_causal_lm
from .processes import single_process
from .trainers import default_arguments, stub_trainer


def online_dpo_stub(module: ModuleType, completions: Any = None, completion_mask: Any = None, **settings: Any) -> Any:
    """Return a stub of this module's trainer (OnlineDPO, XPO, NashMD) whose ``training_step`` runs from 0.12.0 on.

    ``trainer.training_step(trainer.model, {"prompt": [...]})`` samples nothing. OnlineDPO's ``completions`` are given
    with their mask, each of shape ``(2 * prompts, length)``, and the log-probs come from a ``tiny_causal_lm``. In
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


def a2po_stub(module: ModuleType, tokenizer: Any, prompts: Sequence[Any], **settings: Any) -> Any:
    """Return a stub of A2POTrainer for ``a2po_prompts``, with these prompts as its dataset.

    Each completion is one end of sequence, and its reward 1. What the models are given is appended to
    ``trainer.given``, a pair of ids and mask a batch. ``settings`` are of the trainer's arguments.
    """
    import torch

    given: list[Any] = []

    def generate(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        given.append((input_ids, attention_mask))
        return torch.cat([input_ids, torch.ones_like(input_ids[:, :1])], dim=1)

    model = tiny_causal_lm(vocabulary=100)
    model.generate = generate
    attributes: dict[str, Any] = {"processing_class": tokenizer, "ref_model": model, "eos_token_ids": [1]}
    attributes |= {"train_dataset": [{"prompt": prompt} for prompt in prompts], "eval_dataset": None}
    attributes |= {"reward_funcs": [lambda prompts, **kwargs: [1.0] * len(prompts)], "reward_weights": torch.ones(1)}
    attributes |= {"model_kwarg_keys": (), "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")}}
    attributes |= {"generation_config": None, "value_generation_config": None, "given": given, "_optimal_values": None}
    few = {"num_value_samples": 1, "filter_all_incorrect": False}
    args = default_arguments(module.A2POConfig, **{**few, **settings})
    trainer = stub_that_generates(module.A2POTrainer, args, model, **attributes)
    # A DataLoader draws a random number.
    trainer.accelerator.prepare = lambda loader: [loader.dataset]
    return trainer


def a2po_prompts(trainer: Any) -> Any:
    """Return the ids that the models of an ``a2po_stub`` are given: for the optimal values, and in a step."""
    trainer.given.clear()
    with single_process(sys.modules[type(trainer).__mro__[1].__module__]):
        trainer._estimate_optimal_values()
        trainer._prepare_inputs(trainer.train_dataset)
    return [ids for ids, _ in trainer.given]
