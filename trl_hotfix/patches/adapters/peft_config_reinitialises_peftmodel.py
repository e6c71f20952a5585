"""A ``PeftModel`` that comes with a ``peft_config`` is wrapped once more, and its trained adapter is lost.

``get_peft_model`` puts LoRA of the new config into the layers that have the old adapter. One of the same name,
"default", is initialised again; one of another name stays in the layer and is not active any more. With other modules
or another method the old adapter goes on to be a part of the model, but the reference, adapters off, is the base.

From TRL 0.22.0 on ``merge_and_unload`` comes first. The wrapper does the same at the same place, in the
``get_peft_model`` of the trainer's module. So an error there, as for a model that cannot be merged, is raised within
TRL's method: it ends the run and does not switch the patch off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, module_of, shadowed
from ...model import Outcome, Verdict
from ...testing import StopConstruction, base_and_lora, default_arguments, single_process, tiny_tokenizer


def merge_the_adapter_first(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let TRL make the new adapter on a base into which the adapter of the ``PeftModel`` is merged."""
    from peft import PeftModel

    model = argument(wrapped, args, kwargs, "model")
    if not isinstance(model, PeftModel) or argument(wrapped, args, kwargs, "peft_config") is None:
        return wrapped(*args, **kwargs)
    module = module_of(wrapped)
    get_peft_model = module.get_peft_model

    def get_merged_peft_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Another thread may make a trainer of a model without an adapter meanwhile.
        return get_peft_model(_merged(model) if isinstance(model, PeftModel) else model, *args, **kwargs)

    with shadowed(module, "get_peft_model", get_merged_peft_model):
        return wrapped(*args, **kwargs)


def _merged(model: Any) -> Any:
    if not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"peft_config is given with a PeftModel, and its adapter ({type(model.active_peft_config).__name__}) "
            "cannot be merged into the base model to make room for a new one; leave peft_config out to go on training "
            "it (trl_hotfix: peft-config-reinitialises-peftmodel)"
        )
    base = model.merge_and_unload()
    # Older PEFT leaves the name of the old adapter there. It would be saved with the new one, without weights.
    vars(base).pop("peft_config", None)
    return base


def new_adapter_begins_where_the_old_one_ended(module: ModuleType) -> Outcome:
    """Compare the models of trainers with one whose adapter is merged by hand. With the bug they are the base.

    The old adapter has the name of the new one, or another.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    if not _puts_an_adapter_on_every_model(module):
        return absent("this release merges the adapter or refuses it, or leaves this to another method")
    # The merge makes a progress bar, whose thread would stay.
    with shadowed(tqdm, "monitor_interval", 0):
        outcomes = [_judged(module, name) for name in ("default", "policy")]
        if outcomes == [None, None]:
            return absent("this release leaves a PeftModel as it is")
        first, second = outcomes
        if first is None or second is None or first.verdict is not second.verdict:
            raise AssertionError(f"the adapters are not all alike: {outcomes}")
        mistakes = list(_mistakes_elsewhere(module))
        if first.verdict is Verdict.FIXED:
            mistakes += _mistakes_without_a_merge(module)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return first


def _method(module: ModuleType) -> Any:
    if hasattr(module, "GRPOTrainer"):
        return module.GRPOTrainer.__init__
    return getattr(module.SFTTrainer, "_prepare_peft_model", None)


def _puts_an_adapter_on_every_model(module: ModuleType) -> bool:
    """Return whether TRL's method, which may be wrapped, calls ``get_peft_model``, and no line merges or refuses."""
    code = getattr(inspect.unwrap(_method(module)), "__code__", None)
    if code is None or "get_peft_model" not in code.co_names:
        return False
    return "merge_and_unload" not in code.co_names and "together with a `peft_config`" not in str(code.co_consts)


def _judged(module: ModuleType, name: str) -> Outcome | None:
    """Judge how far the new adapter's model is from the trained one, or return None if there is no new adapter."""
    from peft import get_peft_model

    trained = _trained(name)
    expected, base = get_peft_model(_merged_by_hand(trained, name), _new_lora()), _log_probs(_base())
    model = _begun(module, trained, _new_lora())
    if model is trained:
        return None
    right = _log_probs(expected)
    outcome = judge(_distance(_log_probs(model), right), right=0.0, wrong=_distance(base, right))
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_differences(model, expected))):
        raise AssertionError(f"with an old adapter {name!r}: {'; '.join(mistakes)}")
    return outcome


def _differences(model: Any, expected: Any) -> Iterator[str]:
    """Yield where a model differs from the expected one when its new adapter is trained."""
    if list(model.peft_config) != ["default"] or model.active_adapter != "default":
        yield f"the adapters are {list(model.peft_config)}"
    with model.disable_adapter(), expected.disable_adapter():
        if _distance(_log_probs(model), _log_probs(expected)) > 1e-6:
            yield "the model without its adapter is another one"
    gradients, right = _gradients(model), _gradients(expected)
    if gradients.keys() != right.keys():
        yield f"{sorted(gradients)} are trained, not {sorted(right)}"
    elif any(not gradients[name].allclose(right[name], atol=1e-5) or not right[name].any() for name in right):
        yield "the gradients are others"


def _mistakes_elsewhere(module: ModuleType) -> Iterator[str]:
    """Yield what is wrong with an adapter that is to be trained further, and with a new one on a base."""
    import peft

    trained, base = _trained("default"), _base()
    before = {name: weight.clone() for name, weight in trained.state_dict().items()}
    if _begun(module, trained, None) is not trained:
        yield "without a peft_config the model is another one"
    if any(not weight.equal(before[name]) for name, weight in trained.state_dict().items()):
        yield "without a peft_config the model is changed"
    model = _begun(module, base, _new_lora())
    if model.get_base_model() is not base or _distance(_log_probs(model), _log_probs(_base())):
        yield "a model without an adapter is changed"
    if module.get_peft_model is not peft.get_peft_model:
        yield f"the module is left with {module.get_peft_model}"


def _mistakes_without_a_merge(module: ModuleType) -> Iterator[str]:
    """Yield what is wrong with an adapter that cannot be merged."""
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(_base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1))
    try:
        _begun(module, model, _new_lora())
    except ValueError as error:
        if "its adapter (PromptTuningConfig) cannot" not in str(error):
            raise
    else:
        yield "an adapter that cannot be merged is not refused"


def _begun(module: ModuleType, model: Any, peft_config: Any) -> Any:
    """Return the model that the real method makes of ``model``: GRPO's constructor, as far as that of transformers."""
    if not hasattr(module, "GRPOTrainer"):
        settings = SimpleNamespace(bf16=False, gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        return object.__new__(module.SFTTrainer)._prepare_peft_model(model, peft_config, settings)

    class Parent(*module.GRPOTrainer.__bases__):  # type: ignore[misc]
        def __init__(self, model: Any, **unused: Any) -> None:
            self.model = model
            # This is what another thread does.
            module.get_peft_model(*base_and_lora())
            raise StopConstruction

    class Trainer(module.GRPOTrainer, Parent):  # type: ignore[misc, name-defined]
        pass

    settings = default_arguments(module.GRPOConfig, gradient_checkpointing=False)
    trainer: Any = object.__new__(Trainer)
    arguments = {"processing_class": tiny_tokenizer(), "peft_config": peft_config}
    with single_process(module), suppress(StopConstruction):
        trainer.__init__(model, len, settings, **arguments)
    return trainer.model


def _new_lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")


def _base() -> Any:
    base, _ = base_and_lora()
    _fill(base.parameters())
    return base


def _trained(name: str) -> Any:
    """Return a model with a trained adapter of this name."""
    from peft import get_peft_model

    model = get_peft_model(_base(), base_and_lora()[1], adapter_name=name)
    _fill(weight for weight in model.parameters() if weight.requires_grad)
    return model


def _merged_by_hand(model: Any, name: str) -> Any:
    """Return a base whose weights are W + B A alpha / r."""
    base, weights = _base(), model.state_dict()
    for module_name, module in base.named_modules():
        prefix = f"base_model.model.{module_name}"
        if f"{prefix}.lora_A.{name}.weight" in weights:
            lora = model.peft_config[name]
            product = weights[f"{prefix}.lora_B.{name}.weight"] @ weights[f"{prefix}.lora_A.{name}.weight"]
            module.weight.data += product * lora.lora_alpha / lora.r
    return base


def _fill(weights: Any) -> None:
    """Set weights to fixed values, all of them other than 0."""
    import torch

    for number, weight in enumerate(weights):
        weight.data = 0.5 * torch.cos(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)


def _log_probs(model: Any) -> Any:
    import torch

    return model(input_ids=torch.tensor([[2, 3, 4, 5, 6], [7, 1, 2, 6, 3]])).logits.log_softmax(-1)


def _distance(values: Any, others: Any) -> float:
    return float((values - others).abs().max())


def _gradients(model: Any) -> dict[str, Any]:
    """Return the gradients of what is trained, at fixed values."""
    import torch

    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    _fill(trainable.values())
    with torch.enable_grad():
        _log_probs(model)[:, :, 3].sum().backward()
    return {name: weight.grad for name, weight in trainable.items()}
