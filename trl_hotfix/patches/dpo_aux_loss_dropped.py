"""DPO drops the router auxiliary loss of mixture-of-experts models.

The rewrite of ``DPOTrainer`` in TRL 0.29.0 (pull request 3906) left out the term
``router_aux_loss_coef * outputs.aux_loss``, which the loss had since 0.9.6. TRL 1.8.0 has it again (pull request 6208).

``_compute_loss`` calls the model that it is given once, for the policy; the reference is ``ref_model``, or
``self.model`` with its adapter off. So a view in the place of that argument sees the policy alone. Like 1.8.0 it asks
for the router's loss in the call: vision-language models look for it there, and not in their config.

Liger's loss calls the decoder, which returns no ``aux_loss``. Up to 0.28.0 that raised an ``AttributeError``, and 1.8.0
refuses the two together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import Call, WarnOnce, judge, wrapper
from ..model import Outcome, Verdict
from ..testing import dpo_stub, recorded_warnings, tiny_causal_lm, wrapped_like_deepspeed

_COEFFICIENT = 0.5  # of the self-test
_warn = WarnOnce()


def _coefficient(trainer: Any) -> Any:
    """Return the coefficient of the term. It is falsy where the model's config does not ask for the term."""
    # In a vision-language model the router settings are in the text model's config.
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    return getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0)


@wrapper
def add_aux_loss(call: Call) -> Any:
    """Add coefficient * aux_loss of the policy's forward, and log it as ``aux_loss`` as 1.8.0 does."""
    import wrapt

    trainer = call.trainer
    coefficient = _coefficient(trainer)
    if not coefficient:
        return call()
    aux_losses: list[Any] = []

    class RecordingView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = self.__wrapped__(*args, **{**kwargs, "output_router_logits": True})
            aux_losses.append(getattr(outputs, "aux_loss", None))
            return outputs

    result = call.with_(model=RecordingView(call["model"]))()
    (aux_loss,) = aux_losses
    if aux_loss is None:  # Llama 4 has the settings, and no such loss.
        return result
    mode = "train" if call.is_training else "eval"
    trainer._metrics[mode]["aux_loss"].append(trainer.accelerator.gather_for_metrics(aux_loss).mean().item())
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    loss = loss + coefficient * aux_loss.to(loss.device)
    return (loss, *outputs) if isinstance(result, tuple) else loss


@wrapper
def warn_of_liger(call: Call) -> Any:
    """Say once that Liger's loss has no auxiliary term, and leave it as it is."""
    if _coefficient(call.trainer):
        _warn(
            call.trainer,
            "output_router_logits=True, but the Liger loss of DPO has no router auxiliary loss: nothing balances the "
            "experts. TRL 1.8.0 refuses the two together. Train with use_liger_kernel=False, or set "
            "router_aux_loss_coef=0 in the model's config",
        )
    return call()


def aux_loss_is_in_the_loss(module: ModuleType) -> Outcome:
    """Check loss, gradients and log of two micro-batches in training, and of one in evaluation.

    The loss is that without the auxiliary loss, plus coefficient * aux_loss of the policy.
    """
    trainer = _stub(module)
    wrapped_model, batches = wrapped_like_deepspeed(trainer.model), _batches()
    numbers: dict[str, float] = {"measured": 0.0, "right": 0.0, "wrong": 0.0}
    mistakes: list[str] = []
    for number, (model, batch) in enumerate(zip((trainer.model, wrapped_model), batches, strict=True)):
        mistakes += _add_measurement(numbers, trainer, model, batch, f"micro-batch {number}")
    evaluating = _stub(module)
    evaluating.model.eval()
    evaluating.state = SimpleNamespace(global_step=1)
    mistakes += _add_measurement(numbers, evaluating, evaluating.model, batches[1], "evaluation")
    outcome = judge(**numbers)
    if outcome.verdict is Verdict.FIXED:
        mistakes += _mistakes_elsewhere(module, trainer)
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _add_measurement(
    numbers: dict[str, float], trainer: Any, model: Any, batch: dict[str, Any], name: str
) -> list[str]:
    """Add the loss of one micro-batch to ``numbers``. Return what is wrong with its gradients and with the log."""
    loss, gradient, of_router = _loss_and_gradients(trainer, model, batch)
    logged = trainer._metrics["train" if trainer.model.training else "eval"]["aux_loss"][-1:]
    _ask_for_aux_loss(trainer, enabled=False)
    without, gradient_without, _ = _loss_and_gradients(trainer, model, batch)
    _ask_for_aux_loss(trainer, enabled=True)
    aux_loss = float(_aux_loss(trainer.model, batch["input_ids"]).detach())
    numbers["measured"] += loss
    numbers["right"] += without + _COEFFICIENT * aux_loss
    numbers["wrong"] += without
    mistakes = []
    # The derivative of the square by the router's only weight.
    expected = 2 * _COEFFICIENT * aux_loss / float(trainer.model.router.detach())
    if abs(of_router - expected) > 1e-5 or not gradient.allclose(gradient_without):
        mistakes.append(f"{name}: the router's gradient is {of_router}, and not {expected}")
    # As on two ranks, of which the other one has a value that is larger by 1.
    if not logged or abs(logged[0] - (aux_loss + 0.5)) > 1e-5:
        mistakes.append(f"{name}: aux_loss is logged as {logged}, and not as {aux_loss + 0.5}")
    return mistakes


def _stub(module: ModuleType) -> Any:
    """Return a DPO trainer of a model with one router weight. ``trainer.text_config`` is that of the text model."""
    import torch

    text_config = SimpleNamespace(router_aux_loss_coef=_COEFFICIENT, output_router_logits=True)
    config = SimpleNamespace(get_text_config=lambda: text_config, model_type="tiny")

    def mixture_of_experts(router: float) -> Any:
        model = tiny_causal_lm(config)
        model.router = torch.nn.Parameter(torch.tensor(router))

        def add(model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
            # As in vision-language models the config is not asked.
            if kwargs.get("output_router_logits"):
                outputs.aux_loss = _aux_loss(model, kwargs["input_ids"])

        model.register_forward_hook(add, with_kwargs=True)
        return model

    trainer = dpo_stub(
        module,
        model=mixture_of_experts(2.0),
        ref_model=mixture_of_experts(3.0),
        router_aux_loss_coef=_COEFFICIENT,
        text_config=text_config,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        state=SimpleNamespace(global_step=0),
        _is_vlm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.accelerator.gather_for_metrics = lambda value: value if value.dim() else torch.stack([value, value + 1])
    _ask_for_aux_loss(trainer, enabled=True)
    return trainer


def _aux_loss(model: Any, input_ids: Any) -> Any:
    return model.router.square() * input_ids.float().mean()


def _ask_for_aux_loss(trainer: Any, *, enabled: bool) -> None:
    # Releases with the bug have the switch in the model's config alone, releases with the term in the trainer.
    trainer.text_config.output_router_logits = trainer.aux_loss_enabled = enabled


def _batches() -> list[dict[str, Any]]:
    """Return batches of one pair and of two. The chosen come before the rejected; two tokens are the prompt."""
    import torch

    batches = []
    for tokens in ([[1, 2, 3, 4], [1, 2, 5, 6]], [[1, 2, 3, 4, 7], [8, 9, 7, 0, 0], [1, 2, 5, 0, 0], [8, 9, 4, 5, 6]]):
        ids = torch.tensor(tokens)
        completion = (torch.arange(ids.shape[1]) >= 2) & (ids > 0)
        batches.append(
            {"input_ids": ids, "attention_mask": (ids > 0).long(), "completion_mask": completion.long()},
        )
    return batches


def _loss_and_gradients(trainer: Any, model: Any, batch: dict[str, Any]) -> tuple[float, Any, float]:
    """Return the loss, its gradient by the weights of the model, and that by the router."""
    plain = trainer.model
    plain.weight.grad = plain.router.grad = None
    loss = trainer._compute_loss(model, dict(batch), False)
    loss.backward()
    return float(loss.detach()), plain.weight.grad, 0.0 if plain.router.grad is None else float(plain.router.grad)


def _mistakes_elsewhere(module: ModuleType, trainer: Any) -> list[str]:
    """Return what is wrong where the outputs are asked for, where there is no such term, and with Liger."""
    batch, model, metrics = _batches()[0], trainer.model, trainer._metrics["train"]
    result = trainer._compute_loss(model, dict(batch), True)
    right, mistakes = float(trainer._compute_loss(model, dict(batch), False).detach()), []
    if not isinstance(result, tuple) or abs(float(result[0].detach()) - right) > 1e-5:
        mistakes.append(f"the loss is {right}, and with the outputs {result}")
    elif len(result) != 2 or not hasattr(result[1], "logits"):
        mistakes.append(f"the outputs are {result[1:]}")
    if "router_aux_loss_coef" in {field.name for field in fields(module.DPOConfig)}:
        return mistakes  # The arguments decide about the term, and Liger is refused with it.
    with_liger = _stub(module)
    if len(messages := _warnings_with_liger(trainer, 2)) != 1:
        mistakes.append(f"in two calls with Liger it is said: {messages}")
    without = right - _COEFFICIENT * float(_aux_loss(model, batch["input_ids"]).detach())
    dense = tiny_causal_lm(model.config)
    asked: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": _COEFFICIENT}
    for name, settings, case_model in (
        ("the model has no such loss", asked, dense),
        ("the coefficient is 0", {**asked, "router_aux_loss_coef": 0.0}, model),
    ):
        _replace(trainer.text_config, settings)
        metrics.pop("aux_loss", None)
        loss = trainer._compute_loss(case_model, dict(batch), False)
        if abs(float(loss.detach()) - without) > 1e-5 or not loss.requires_grad or "aux_loss" in metrics:
            mistakes.append(f"{name}: the loss is {loss}, and not {without}")
    off = ({**asked, "output_router_logits": False}, {**asked, "router_aux_loss_coef": 0.0})
    for settings in (*off, {"output_router_logits": True}, {"router_aux_loss_coef": _COEFFICIENT}):
        _replace(with_liger.text_config, settings)
        if messages := _warnings_with_liger(with_liger, 1):
            mistakes.append(f"{settings}: with Liger it is said: {messages}")
    _replace(with_liger.text_config, asked)
    if len(messages := _warnings_with_liger(with_liger, 1)) != 1:
        mistakes.append(f"of another trainer with Liger it is said: {messages}")
    return mistakes


def _replace(config: SimpleNamespace, settings: dict[str, Any]) -> None:
    vars(config).clear()
    vars(config).update(settings)


def _warnings_with_liger(trainer: Any, calls: int) -> list[str]:
    """Return the warnings of calls with Liger. Its loss is a constant here, since Liger is an optional package."""
    import torch

    def backbone(*args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.zeros(2, 4, 1))

    # Releases call the decoder by one of the first two names.
    for model in (trainer.model, trainer.ref_model):
        model.base_model, model.get_decoder = backbone, lambda: backbone
        model.get_output_embeddings = lambda: SimpleNamespace(weight=None, bias=None)
    expected = torch.tensor(3.0)
    trainer.liger_loss_fn = lambda *args: (expected, (torch.zeros(()),) * 7)
    with recorded_warnings() as messages:
        losses = [trainer._compute_loss_liger(trainer.model, _batches()[0], False) for _ in range(calls)]
    if not all(loss is expected for loss in losses):
        raise AssertionError(f"with Liger the loss is {losses}, and not {expected}")
    return messages
