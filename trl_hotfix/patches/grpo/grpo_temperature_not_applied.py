"""GRPO of 0.14 and 0.15 samples at its temperature, 0.9 by default, and trains on log-probs of temperature 1.

``_get_per_token_logps`` (0.15.0, line 487), and the function ``get_per_token_logps`` within ``compute_loss`` of 0.14.0
(line 438), take the log-softmax of the logits as they are. But GRPO draws the completions from
``logits / temperature``. Pull request 3029 divides them in 0.16.0, for the policy and for its reference.

In 0.14 the policy's own ``generate`` is called in the same method. It calls the model itself, and not the view of it
whose logits are divided.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, tiny_causal_lm


@wrapper
def divide_the_logits(call: Call) -> Any:
    """Give the method that computes log-probs a view of the model whose logits are divided by the temperature."""
    if not _divides(call.trainer):
        return call()
    return call.with_(model=_divided(call["model"], call.trainer.args.temperature))()


@wrapper
def divide_the_logits_of_both(call: Call) -> Any:
    """Give ``compute_loss`` such a view of the policy, and one of the reference, unless it is the policy itself."""
    trainer = call.trainer
    reference = getattr(trainer, "ref_model", None)
    if reference is None or not _divides(trainer):
        return divide_the_logits(call)
    with shadowed(trainer, "ref_model", _divided(reference, trainer.args.temperature)):
        return divide_the_logits(call)


def _divides(trainer: Any) -> bool:
    # transformers and vLLM take None for 1. At 0 vLLM takes the likeliest token, which has a log-prob of 0.
    return trainer.args.temperature not in (None, 0, 1)


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
    """Differentiate the loss by the logit of the better one of two completions of one token, at temperature 0.5.

    The gradient is -advantage / 2 / temperature, whatever the logits are: the probability of that token, by which it
    depends on them, cancels out between the two.
    """
    import torch

    if hasattr(module.GRPOTrainer, "_get_per_token_logps_and_entropies"):
        return absent("this release divides the logits in another method")
    method = getattr(module.GRPOTrainer, "_get_per_token_logps", None)
    if method and "batch_size" in inspect.signature(method).parameters:
        return absent("this release divides the logits, of some rows at a time")
    policy, reference = tiny_causal_lm(), tiny_causal_lm()
    for model in (policy, reference):
        # 0.14.0 counts on it.
        model.register_forward_hook(_keep, with_kwargs=True)
    settings: dict[str, Any] = {"model": policy, "reference": reference, "temperature": 0.5, "beta": 0.0}
    trainer = stub_that_scores(module, [[6], [7]], [1.0, 0.0], **settings)
    policy.generate = lambda input_ids, **kwargs: torch.tensor([[3, 4, 6], [3, 4, 7]])
    vars(trainer).update(epsilon_low=0.2, epsilon_high=0.2)
    # 0.14.0 generates in the method that computes the loss.
    inputs = scored_completions(trainer) if method else [{"prompt": "a"}]
    (gradient,) = torch.autograd.grad(trainer.compute_loss(policy, inputs), policy.weight)
    advantage = 0.5 / (0.5**0.5 + 1e-4)
    return judge(float(gradient[4, 6]), right=-advantage / 2 / 0.5, wrong=-advantage / 2)


def _keep(model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
    outputs.logits = outputs.logits[:, -kwargs.get("num_logits_to_keep", 0) :]
