"""Recurrent models see the padding of a batch that has one row.

``apply_mask_to_padding_states`` of transformers sets the hidden states of padding to zero, so that the recurrence does
not take them up. From 4.50 to 5.14 it does so for several rows only, as if one row had no padding. GRPO and RLOO pad
prompts on the left where they generate, and score the rows in batches of ``per_device_train_batch_size``.

The columns before the first token of the row are cut from what the model is called with. TRL counts logits from the
end, so nothing else changes.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, called_with, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer, trainer_and_config

_RECURRENT = frozenset(
    {
        *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe"),
        *("mamba2", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    }
)
"""The ``model_type`` of the models that call ``apply_mask_to_padding_states``, in transformers 4.50 to 5.9."""


@wrapper
def cut_the_padding_of_one_row(call: Call) -> Any:
    """Call a recurrent model, the policy or its reference, without the padding of a row that is alone in its batch."""
    mask, model = call["attention_mask"], call["model"]
    rows, size = len(mask), call["batch_size"] or len(mask)
    is_alone = size == 1 or rows % size == 1
    if is_alone and _is_recurrent(call.trainer.accelerator.unwrap_model(model)) and not mask[:, 0].all():
        return call.with_(model=called_with(model, _without_padding))()
    return call()


def _is_recurrent(model: Any) -> bool:
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    return str(getattr(text_config, "model_type", "")).removesuffix("_text") in _RECURRENT


def _without_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward without the columns before the first token, if they are of one row."""
    mask = arguments["attention_mask"]
    if len(mask) > 1:
        return arguments
    first = int(mask[0].argmax())
    is_per_token = {name: getattr(value, "shape", ())[:2] == mask.shape for name, value in arguments.items()}
    return {name: value[:, first:] if is_per_token[name] else value for name, value in arguments.items()}


_SCORERS = ("_full_logits_logps", "_get_per_token_logps", "_get_per_token_logps_and_entropies")


def one_row_is_scored_without_its_padding(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of the last token of a row with one column of padding.

    The logits are the number of states so far, those of padding masked by transformers, times a weight of each of two
    tokens, which is 0. So the gradient by the weight of the token is half the number of states before it: 2, or 3.
    """
    import torch

    try:
        from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states
    except ImportError:
        return absent("this transformers is older than 4.50")
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    scorer = next((name for name in _SCORERS if name in vars(trainer_class)), None)
    if scorer is None:
        return absent("this release computes the log-probs elsewhere")

    def forward(input_ids: Any, attention_mask: Any, logits_to_keep: int = 0, **unused: Any) -> Any:
        states = apply_mask_to_padding_states(torch.ones(*input_ids.shape, 1), attention_mask).cumsum(1)
        logits = (states @ model.head.T)[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits, log_probs=logits[:, :-1].log_softmax(-1)[..., 1])

    model: Any = torch.nn.Module()
    model.head, model.forward = torch.nn.Parameter(torch.zeros(2, 1)), forward
    model.config = SimpleNamespace(model_type="mamba2", get_text_config=lambda: model.config)
    model.get_output_embeddings = lambda: SimpleNamespace(weight=model.head, bias=None)
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, report_to=[], temperature=1.0),
        model=model,
        model_kwarg_keys={"logits_to_keep"},
        _is_vlm=False,
        state=SimpleNamespace(global_step=0),
    )
    trainer.accelerator.autocast = torch.enable_grad
    scored = getattr(trainer, scorer)(model, torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1]]), 1)
    log_prob = scored[0] if isinstance(scored, tuple) else scored
    (gradient,) = torch.autograd.grad(log_prob[0, 0], model.head)
    return judge(float(gradient[1, 0]), right=1.0, wrong=1.5)
