"""GRPO and RLOO score left-padded prompts at the wrong positions in models with a table of absolute positions.

``generate`` counts positions from the first real token. The forward pass that computes the log-probs of the policy and
of its reference gives no ``position_ids``, and the models below then count the padding too. With rotary or ALiBi
positions that changes nothing, since only distances matter; a learned or sinusoidal table gives every token of a padded
row another embedding.

``position_ids = cumsum(attention_mask) - 1``, of shape ``(batch, length)``, is also what TRL's own ``forward`` in
``trl/trainer/utils.py`` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, called_with, judge, replaced_argument
from ..model import Outcome
from ..testing import default_arguments, stub_trainer, tiny_causal_lm

_COUNT_THE_PADDING = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "xglm"})
"""The ``model_type`` of decoders that look positions up in a table, take ``position_ids`` and otherwise count from 0.

Checked in transformers 4.46.3, 4.57.6 and 5.23.0. OPT and BioGPT (up to transformers 4) count by the attention mask.
"""


def count_positions_from_the_first_token(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the model, the policy or its reference, the positions that ``generate`` gave it."""
    model = argument(wrapped, args, kwargs, "model")
    plain = instance.accelerator.unwrap_model(model)
    # With prompt learning a virtual prompt precedes the padding, and PEFT accepts no position_ids.
    prompt_learning = getattr(getattr(plain, "active_peft_config", None), "is_prompt_learning", False)
    if prompt_learning or getattr(getattr(plain, "config", None), "model_type", None) not in _COUNT_THE_PADDING:
        return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "model", called_with(model, _with_positions))
    return wrapped(*args, **kwargs)


def _with_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments.get("position_ids") is not None or arguments.get("attention_mask") is None:
        return arguments
    return {**arguments, "position_ids": (arguments["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)}


def padding_on_the_left_changes_no_log_prob(module: ModuleType) -> Outcome:
    """Compare the log-probs of three tokens after a prompt of two, with and without two tokens of padding before it."""
    import torch

    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    names = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
    method_name = next((name for name in names if name in vars(trainer_class)), None)
    if method_name is None:
        return absent("this release computes the log-probs elsewhere")
    model = tiny_causal_lm(SimpleNamespace(model_type="gpt2"))

    def learned_positions(submodule: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make the output of a token depend on its position, which is counted from the first column by default."""
        kwargs = dict(kwargs)
        positions = kwargs.pop("position_ids", None)
        if positions is None:
            positions = torch.arange(kwargs["input_ids"].shape[1])
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + positions) % 11}

    def keep_last_logits(submodule: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        # TRL 0.19 relies on logits_to_keep.
        outputs.logits = outputs.logits[:, -kwargs.get("logits_to_keep", 0) :]

    model.register_forward_pre_hook(learned_positions, with_kwargs=True)
    model.register_forward_hook(keep_last_logits, with_kwargs=True)
    settings = default_arguments(getattr(module, f"{method}Config"), report_to=[], temperature=1.0)
    # TRL 0.27 labels the timing of the forward with the step.
    trainer = stub_trainer(trainer_class, settings, state=SimpleNamespace(global_step=0))
    trainer.model_kwarg_keys = {"logits_to_keep"}
    trainer.accelerator.autocast = torch.no_grad

    def log_probs(padding: int) -> float:
        tokens = torch.tensor([[0] * padding + [3, 5, 2, 7, 4]])
        mask = torch.tensor([[0] * padding + [1] * 5])
        with torch.no_grad():
            outputs = getattr(trainer, method_name)(model, tokens, mask, 3)
        return float((outputs[0] if isinstance(outputs, tuple) else outputs).sum())

    def formula(begin: int) -> float:
        """Sum the log-probs of the tokens, each given the token before it, with the prompt at position ``begin``."""
        tokens = torch.tensor([3, 5, 2, 7, 4])
        next_token_log_probs = model.weight[(tokens + begin + torch.arange(5)) % 11].log_softmax(-1)
        return float(sum(next_token_log_probs[place - 1, tokens[place]] for place in (2, 3, 4)))

    unpadded = log_probs(0)
    if abs(unpadded - formula(0)) > 1e-5:
        raise AssertionError(f"without padding the log-probs are {unpadded}, by the formula {formula(0)}")
    return judge(log_probs(2), right=formula(0), wrong=formula(2), unpadded=unpadded)
