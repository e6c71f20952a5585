"""DPO drops the router auxiliary loss of mixture-of-experts models.

The rewrite of ``DPOTrainer`` in TRL 0.29.0 (pull request 3906) left out the term
``router_aux_loss_coef * outputs.aux_loss``, which the loss had since 0.9.6. TRL 1.8.0 has it again (pull request 6208).

``_compute_loss`` calls the policy first and the reference after it, so the first ``aux_loss`` is the policy's. A hook
on the model that is passed in takes it: a DeepSpeed engine and DDP call hooks like any module, but PEFT calls the
``forward`` of its inner model directly, so a hook on that model would not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import argument, judge
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm, wrapped_like_deepspeed


def add_aux_loss(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add coefficient * aux_loss of the policy's forward, and log it as ``aux_loss`` as 1.8.0 does."""
    config = instance.accelerator.unwrap_model(instance.model).config
    # In a vision-language model the router settings are in the text model's config.
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not coefficient or not getattr(config, "output_router_logits", False):
        return wrapped(*args, **kwargs)

    aux_losses: list[Any] = []
    hook = argument(wrapped, args, kwargs, "model").register_forward_hook(
        lambda model, inputs, outputs: aux_losses.append(getattr(outputs, "aux_loss", None))
    )
    try:
        result = wrapped(*args, **kwargs)
    finally:
        hook.remove()
    # The reference may go through the same module (PEFT with its adapter off): the first forward is the policy's.
    if not aux_losses or aux_losses[0] is None:
        return result
    mode = "train" if instance.model.training else "eval"
    logged = instance.accelerator.gather_for_metrics(aux_losses[0].detach()).mean().item()
    instance._metrics[mode]["aux_loss"].append(logged)
    loss = result[0] if isinstance(result, tuple) else result
    loss = loss + coefficient * aux_losses[0].to(loss.device)
    return (loss, *result[1:]) if isinstance(result, tuple) else loss


def aux_loss_is_in_the_loss(module: ModuleType) -> Outcome:
    """Check that the loss of one pair is that without the auxiliary loss, plus coefficient * aux_loss."""
    import torch

    coefficient, aux_loss = 0.5, 2.0
    config = SimpleNamespace(router_aux_loss_coef=coefficient, output_router_logits=True, model_type="tiny")
    model = tiny_causal_lm(config, aux_loss=aux_loss)
    trainer = dpo_stub(
        module,
        model=model,
        ref_model=tiny_causal_lm(config, aux_loss=7.0),
        router_aux_loss_coef=coefficient,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    # One pair: the chosen sequence, then the rejected one; the first two tokens are the prompt.
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])

    def loss_through(model: Any, *, enabled: bool) -> float:
        # Releases with the bug have the switch in the model's config alone, releases with the term in the trainer too.
        config.output_router_logits = trainer.aux_loss_enabled = enabled
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask}
        return float(trainer._compute_loss(model, inputs, False).detach())

    without = loss_through(model, enabled=False)
    plain = loss_through(model, enabled=True)
    wrapped = loss_through(wrapped_like_deepspeed(model), enabled=True)
    if plain != wrapped:
        raise AssertionError(f"plain model {plain!r}, wrapped model {wrapped!r}")
    right = without + coefficient * aux_loss
    return judge(plain, right=right, wrong=without, coefficient=coefficient, aux_loss=aux_loss)
