"""GRPO of 0.14 and 0.15 samples at its temperature, 0.9 by default, and trains on log-probs of temperature 1.

``_get_per_token_logps`` (0.15.0, line 487), and the function ``get_per_token_logps`` within ``compute_loss`` of 0.14.0
(line 438), take the log-softmax of the logits as they are. The distribution that the completions were drawn from is
that of ``logits / temperature``. Pull request 3029 divides them in 0.16.0, for the policy and for its reference.

In 0.14 the policy's own ``generate`` is called in the same method. It calls the model itself, and not the view of it
whose logits are divided.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, replaced_argument, shadowed
from ...model import Outcome
from ...testing import (
    judge_with_gradients,
    scored_completions,
    stub_with_reference,
    tiny_causal_lm,
    token_losses_of_a_group,
)


def divide_the_logits(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the method that computes log-probs a view of the model whose logits are divided by the temperature."""
    if _divides(instance):
        model = _divided(argument(wrapped, args, kwargs, "model"), instance.args.temperature)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "model", model)
    return wrapped(*args, **kwargs)


def divide_the_logits_of_both(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``compute_loss`` such a view of the policy, and one of the reference, unless it is the policy itself."""
    reference = getattr(instance, "ref_model", None)
    if reference is None or not _divides(instance):
        return divide_the_logits(wrapped, instance, args, kwargs)
    with shadowed(instance, "ref_model", _divided(reference, instance.args.temperature)):
        return divide_the_logits(wrapped, instance, args, kwargs)


def _divides(instance: Any) -> bool:
    # transformers and vLLM take None for 1. At 0 vLLM takes the likeliest token, which has a log-prob of 0.
    return instance.args.temperature not in (None, 0, 1)


def _divided(model: Any, temperature: float) -> Any:
    """Return a view of ``model``, wrapped or not, whose calls return logits that are divided by ``temperature``."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = self.__wrapped__(*args, **kwargs)
            # A model of transformers that does not know logits_to_keep returns all logits. TRL drops what it need not.
            outputs.logits = outputs.logits[:, -kwargs.get("logits_to_keep", 0) :] / temperature
            return outputs

    return View(model)


def log_probs_are_those_of_the_temperature(module: ModuleType) -> Outcome:
    """Compare losses and gradients with the formula, for a reference model and for an adapter that is disabled.

    Three micro-batches of two steps and one of an evaluation, and another trainer, whose model is wrapped.
    """
    if hasattr(module.GRPOTrainer, "_get_per_token_logps_and_entropies"):
        return absent("this release divides the logits in another method")
    method = getattr(module.GRPOTrainer, "_get_per_token_logps", module.GRPOTrainer.compute_loss)
    if "batch_size" in inspect.signature(method).parameters:
        return absent("this release divides the logits, of some rows at a time")
    trainer = _Trainer(module, 0.5)
    outcomes = [
        trainer.judged(0, (5, 9, 2), training=True),
        trainer.judged(0, (7, 3, 8), training=True),
        trainer.judged(1, (5, 9, 2), training=True),
        trainer.judged(1, (6, 4, 11), training=False),
        _Trainer(module, 2.0, has_adapter=True).judged(0, (5, 9, 2), training=True),
    ]
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some log-probs are those of the temperature, and others are not: {outcomes}")
    _check_left_alone()
    return outcomes[0]


def _check_left_alone() -> None:
    """Check that the models are TRL's own at the temperatures that change nothing, or cannot be divided by."""
    for temperature in (None, 0.0, 1.0):
        policy, trainer = object(), SimpleNamespace(args=SimpleNamespace(temperature=temperature), ref_model=object())
        for wrapper in (divide_the_logits, divide_the_logits_of_both):
            model, reference = wrapper(
                lambda model, trainer=trainer: (model, trainer.ref_model), trainer, (policy,), {}
            )
            # A view is equal to what it is a view of.
            if model is not policy or reference is not trainer.ref_model:
                raise AssertionError(f"{wrapper.__name__} changes a model at temperature {temperature}")


_BETA, _REWARDS = 0.3, (1.0, 4.0, 2.0, 0.0)


class _Trainer:
    """A trainer on four completions of one prompt. With an adapter the model is wrapped, and is its own reference."""

    def __init__(self, module: ModuleType, temperature: float, *, has_adapter: bool = False) -> None:
        self.temperature = temperature
        self.policy, self.reference = _model(0.0), _model(1.0)
        self.trainer = stub_with_reference(
            module,
            self.policy,
            self.reference,
            self._generate,
            _REWARDS,
            has_adapter=has_adapter,
            temperature=temperature,
            beta=_BETA,
        )
        vars(self.trainer).update(epsilon_low=0.2, epsilon_high=0.2)
        # 0.14.0 generates in the method that computes the loss.
        self.generates_in_the_loss = not hasattr(module.GRPOTrainer, "_get_per_token_logps")

    def _generate(self, input_ids: Any, **kwargs: Any) -> Any:
        import torch

        # The model calls itself here, and samples from its own logits: the temperature is applied later.
        if not torch.equal(self.policy(input_ids).logits, self.policy.weight[input_ids]):
            raise AssertionError("completions are drawn from other logits than the model's")
        return self.tokens

    def judged(self, global_step: int, first_row: tuple[int, int, int], *, training: bool) -> Outcome:
        """Judge loss and gradient of a micro-batch whose completions follow from the first one."""
        import torch

        completions = torch.tensor([[2 + (token + 3 * row) % 14 for token in first_row] for row in range(4)])
        self.tokens = torch.cat([torch.tensor([[3, 4]]).expand(4, 2), completions], dim=1)
        trainer, reference = self.trainer, self.trainer.ref_model
        trainer.state.global_step, trainer.control.should_evaluate = global_step, not training
        trainer.model.train(training)
        inputs = [{"prompt": "a"}] if self.generates_in_the_loss else scored_completions(trainer)
        loss = trainer.compute_loss(trainer.model, inputs)
        if trainer.ref_model is not reference:
            raise AssertionError("the trainer has another reference afterwards")
        right, wrong = self._expected(self.temperature), self._expected(1.0)
        return judge_with_gradients([self.policy.weight], [(loss, right, wrong)])

    def _expected(self, temperature: float) -> Any:
        """Return the loss by the formula at this temperature. All completions are equally long."""
        import torch

        def log_probs(weight: Any) -> Any:
            distribution = (weight[self.tokens[:, 1:-1]] / temperature).log_softmax(-1)
            return distribution.gather(-1, self.tokens[:, 2:, None])[..., 0]

        policy, reference = (log_probs(model.weight) for model in (self.policy, self.reference))
        return token_losses_of_a_group(policy, reference, torch.tensor(_REWARDS), _BETA).mean()


def _model(phase: float) -> Any:
    """Return a model of one matrix. It knows ``num_logits_to_keep``, and not ``logits_to_keep``."""
    import torch

    model = tiny_causal_lm(vocabulary=16)
    model.weight.data = torch.sin(torch.arange(256, dtype=torch.float32, device="cpu") + phase).view(16, 16)

    def keep(model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        outputs.logits = outputs.logits[:, -kwargs.get("num_logits_to_keep", 0) :]

    model.register_forward_hook(keep, with_kwargs=True)
    return model
