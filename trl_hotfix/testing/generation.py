"""Stand-ins for the trainers of GRPO and RLOO while they generate completions, and while they score them.

A self-test of the sampling uses ``stub_that_generates`` and ``completions_of``; its model's ``generate`` decides what
is sampled. A self-test of the values that are computed from completions (masks, advantages, log-probs, metrics) uses
``stub_that_scores`` and ``scored_completions``.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from .grpo import metrics_by_mode
from .models import tiny_attention_model
from .processes import single_process
from .trainers import default_arguments, stub_trainer


class PromptTokenizer:
    """A tokenizer that encodes every prompt as the tokens 3 and 4, and decodes every completion as the empty string."""

    pad_token, pad_token_id, eos_token, eos_token_id, bos_token_id = "<pad>", 0, "<eos>", 1, None
    chat_template = None
    prompt_ids = (3, 4)

    def __call__(self, text: Any = None, return_tensors: str | None = None, **kwargs: Any) -> Any:
        import torch

        ids = [list(self.prompt_ids) for _ in (text if isinstance(text, (list, tuple)) else [text])]
        mask = [[1] * len(row) for row in ids]
        if return_tensors is None:
            return type("Encoding", (dict,), {"input_ids": ids})(input_ids=ids, attention_mask=mask)
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
        return ["" for _ in ids]


def stub_that_generates(trainer_class: type, args: SimpleNamespace, model: Any, **attributes: Any) -> Any:
    """Return a stub whose ``completions_of`` gets to ``model.generate`` or ``model.generate_batch``.

    It is one of GRPO, RLOO or, from 0.23.0 on, OnlineDPO, for a text model, without vLLM. The one prompt has tokens 3
    and 4; 0 is padding and 1 the end of a sequence.
    """
    import torch

    tokenizer = PromptTokenizer()
    defaults: dict[str, Any] = {
        "model": model,
        "model_wrapped": model,
        "processing_class": tokenizer,
        "_tokenizer": tokenizer,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
        "_dist": SimpleNamespace(summon_full_params=lambda *args, **kwargs: nullcontext()),
        "state": SimpleNamespace(global_step=0, num_input_tokens_seen=0),
        "tools": None,
        "rollout_func": None,
        "chat_template": None,
        "chat_template_kwargs": {},
        "max_prompt_length": None,
        "pad_to_multiple_of": None,
        "control": SimpleNamespace(should_evaluate=False),
    }
    args.report_to, args.device, args.past_index = [], torch.device("cpu"), -1
    trainer = stub_trainer(trainer_class, args, **{**defaults, **attributes})
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    trainer.accelerator.process_index = 0
    return trainer


def completions_of(trainer: Any) -> Any:
    """Run the method in which this release's ``trainer`` calls ``generate``, and return its result."""
    names = ("_generate_single_turn", "_generate_and_score_completions", "_prepare_inputs", "_generate")
    method = getattr(trainer, next(name for name in names if name in vars(type(trainer).__mro__[1])))
    known: dict[str, Any] = {
        "inputs": [{"prompt": "a"}],
        "model": trainer.model,
        "prompts": ["a"],
        "prompt_ids": [list(PromptTokenizer.prompt_ids)],
        "images": None,
        "multimodal_fields": {},
        "num_generations": 1,
    }
    parameters = inspect.signature(method).parameters
    return method(**{name: value for name, value in known.items() if name in parameters})


def stub_that_scores(
    module: ModuleType,
    completions: Sequence[Sequence[int]],
    rewards: Sequence[float | None],
    *,
    model: Any = None,
    reference: Any = None,
    training: bool = True,
    **settings: Any,
) -> Any:
    """Return a GRPO or RLOO stub of this module for ``scored_completions``. It samples nothing.

    ``completions`` are the token ids that ``model.generate`` returns, from 2 to 15, with 1 at the end of a completion
    that is not truncated; ``rewards`` come from the one reward function. The ``model`` and its ``reference`` are a
    ``tiny_attention_model`` each, unless they are given. All completions are of one prompt, unless ``settings``, fields
    of the config, have another ``num_generations``.
    """
    import torch

    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    count = len(completions)
    if count != len(rewards):
        raise ValueError(f"{count} completions with {len(rewards)} rewards")

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        longest = max(map(len, completions))
        rows = [[*ids, *[PromptTokenizer.pad_token_id] * (longest - len(ids))] for ids in completions]
        return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)

    def fixed_rewards(**kwargs: Any) -> list[float | None]:
        return list(rewards)

    policy = tiny_attention_model() if model is None else model
    policy.generate = generate
    policy.train(training)
    of_a_step = {
        "num_generations": count,
        "num_generations_eval": count,
        "num_iterations": 1,
        "steps_per_generation": 1,
        "per_device_train_batch_size": count,
        "per_device_eval_batch_size": count,
        "scale_rewards": "group",
    }
    logs: dict[str, Any] = defaultdict(list, {"rewards": defaultdict(list), "extra": defaultdict(list)})
    trainer = stub_that_generates(
        getattr(module, f"{method}Trainer"),
        default_arguments(getattr(module, f"{method}Config"), **{**of_a_step, **settings}),
        policy,
        ref_model=tiny_attention_model() if reference is None else reference,
        control=SimpleNamespace(should_evaluate=not training),
        generation_config=None,
        generation_kwargs={},
        reward_funcs=[fixed_rewards],
        reward_func_names=["fixed_rewards"],
        reward_processing_classes=[None],
        reward_weights=torch.ones(1),
        _metrics=metrics_by_mode(),
        _logs=logs,
        _textual_logs=logs,
        _pending_extra_logs=defaultdict(list),
        _pending_metrics=defaultdict(list),
        _total_train_tokens=0,
        _is_vlm=False,
        eos_token_ids=[PromptTokenizer.eos_token_id],
        environment_factories=None,
        environments=None,
        model_kwarg_keys=set(),
        scored_rows=count,
    )
    trainer.accelerator.autocast = torch.no_grad
    return trainer


def scored_completions(trainer: Any) -> dict[str, Any]:
    """Return the output of the ``_generate_and_score_completions`` of a stub of ``stub_that_scores``.

    0.15 has that code in ``_prepare_inputs``. 0.14.0, and RLOO before 0.22.0, have it in no method of its own, which is
    a ``NotImplementedError``.
    """
    trainer_class = type(trainer).__mro__[1]
    name = "_generate_and_score_completions"
    if not hasattr(trainer_class, name):
        name = "_prepare_inputs"
        if not hasattr(trainer_class, "_get_per_token_logps"):
            raise NotImplementedError(f"{trainer_class.__name__} of this release scores completions in no method")
    with single_process(sys.modules[trainer_class.__module__]):
        output: dict[str, Any] = getattr(trainer, name)([{"prompt": "a"} for _ in range(trainer.scored_rows)])
    return output
