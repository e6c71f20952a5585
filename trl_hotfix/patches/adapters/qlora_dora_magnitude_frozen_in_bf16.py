"""On a model that is loaded in 4 or 8 bits the trainers cast DoRA's magnitude vectors to bfloat16, with all adapters.

What is cast is ``param.data`` of everything that is trained, after ``get_peft_model``, in the middle of ``__init__``.
An update of a magnitude, of about the learning rate, is less than half of what bfloat16 can tell apart from it. TRL
1.15.0 leaves out the parameters that have ``lora_magnitude_vector`` in their names (issue 7268).

A cast back would keep the rounding. So the wrapper notes the vectors of the model, and of the model that
``get_peft_model`` returns meanwhile, and puts their own numbers back: also if ``__init__`` fails, since a ``PeftModel``
is the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, argument, judge, module_of, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    StopConstruction,
    absent_if_reexported,
    default_arguments,
    single_process,
    tiny_tokenizer,
)


def keep_magnitudes(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the trainer, and give DoRA's magnitude vectors the numbers and the dtype that they had before."""
    module, magnitudes = module_of(wrapped), _magnitudes(argument(wrapped, args, kwargs, "model"))
    make_adapter = module.get_peft_model

    def make_and_note(*args: Any, **options: Any) -> Any:
        model = make_adapter(*args, **options)
        magnitudes.update(_magnitudes(model))
        return model

    # Not ``shadowed``: this alone does not act.
    module.get_peft_model = make_and_note  # type: ignore[attr-defined]
    try:
        return wrapped(*args, **kwargs)
    finally:
        module.get_peft_model = make_adapter  # type: ignore[attr-defined]
        for weight, numbers in magnitudes.items():
            if weight.dtype != numbers.dtype:
                weight.data = numbers.to(weight.device)
                act()


def _magnitudes(model: Any) -> dict[Any, Any]:
    """Return DoRA's magnitude vectors in a model, each with its numbers; none if the model is not loaded yet."""
    if not hasattr(model, "named_parameters"):
        return {}
    return {weight: weight.data for name, weight in model.named_parameters() if "lora_magnitude_vector" in name}


def magnitudes_are_in_float32(module: ModuleType) -> Outcome:
    """Count the bits of DoRA's magnitude vectors, when the real constructor hands the model on.

    A model in 8 bits is given a new adapter, or has one with another one beside it that is not trained. The matrices of
    LoRA are cast to bfloat16 all the same, and of a model that is not quantised nothing is.
    """
    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if (reexported := absent_if_reexported(module, trainer_class.__init__)) is not None:
        return reexported
    constructor = inspect.unwrap(trainer_class.__init__).__code__
    if not {"bfloat16", "get_peft_model"} <= set(constructor.co_names) or "is_loaded_in_8bit" not in str(
        constructor.co_consts
    ):
        return absent("in this release this trainer casts no adapter to bfloat16")
    if _magnitudes("the name of a model"):
        raise AssertionError("a name has magnitude vectors")
    # A model that is not quantised is right in any case.
    kinds = ((True, False), (True, True), (False, False))
    outcomes = [_judged(module, trainer_class, is_quantised, with_adapter) for is_quantised, with_adapter in kinds]
    new, given, not_quantised = (outcome.verdict for outcome in outcomes)
    if new is not given or not_quantised is not Verdict.FIXED:
        raise AssertionError(f"the models are not all treated alike: {outcomes}")
    return outcomes[0]


def _judged(module: ModuleType, trainer_class: Any, is_quantised: bool, with_adapter: bool) -> Outcome:
    """Judge the bits of the magnitude vectors that are trained. Fails if something else is not as it should be."""
    import torch

    model = _model(is_quantised, with_adapter)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    made = _made(module, trainer_class, model, {} if with_adapter else {"peft_config": _dora()})
    weights = dict(made.named_parameters())
    magnitudes = {name: weight for name, weight in weights.items() if ".lora_magnitude_vector.default" in name}
    matrices = {weight.dtype for name, weight in weights.items() if ".lora_A.default" in name}
    others = {weight.dtype for name, weight in weights.items() if ".default" not in name}
    if len(magnitudes) != 2 or matrices != {torch.bfloat16 if is_quantised else torch.float32}:
        raise AssertionError(f"there are {len(magnitudes)} magnitude vectors, and the matrices are in {matrices}")
    if others != {torch.float32} or not all(weight.requires_grad for weight in magnitudes.values()):
        raise AssertionError(f"what is not trained is in {others}, and these are trained: {magnitudes}")
    sizes = {weight.dtype.itemsize * 8 for weight in magnitudes.values()}
    own = {name: before.get(name, torch.full_like(weight, 3.3)) for name, weight in magnitudes.items()}
    if sizes == {32} and not all(weight.equal(own[name]) for name, weight in magnitudes.items()):
        raise AssertionError(f"the magnitudes are {magnitudes}: expected {own}")
    return judge(sum(sizes) / len(sizes), right=32, wrong=16, magnitudes=len(magnitudes))


def _made(module: ModuleType, trainer_class: Any, model: Any, adapter: Mapping[str, Any]) -> Any:
    """Return the model that the real ``__init__`` hands to its superclass, with all magnitudes of a new adapter 3.3."""
    handed_on: list[Any] = []

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, **unused: Any) -> None:
            handed_on.append(model)
            raise StopConstruction

    class Stub(trainer_class, Parent):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    def make_adapter(*args: Any, **options: Any) -> Any:
        from peft import get_peft_model

        made = get_peft_model(*args, **options)
        for name, weight in made.named_parameters():
            if "lora_magnitude_vector" in name:
                weight.data.fill_(3.3)
        return made

    with_rewards = "reward_funcs" in inspect.signature(trainer_class.__init__).parameters
    arguments: dict[str, Any] = {"args": _arguments(module, trainer_class), "processing_class": tiny_tokenizer()}
    arguments["train_dataset"] = _rows()
    if with_rewards:
        arguments["reward_funcs"] = len
    # A self-test must not set the seed of the process. accelerate reads the metadata of peft at each call.
    shadows: dict[str, Any] = {"set_seed": lambda *args, **kwargs: None, "is_peft_model": _is_peft}
    shadows["get_peft_model"] = make_adapter
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        for name in [name for name in shadows if hasattr(module, name)]:
            stack.enter_context(shadowed(module, name, shadows[name]))
        with suppress(StopConstruction):
            Stub.__init__(object.__new__(Stub), model=model, **arguments, **adapter)
        if module.get_peft_model is not make_adapter:
            raise AssertionError(f"{module.__name__} is left with another get_peft_model")
    return handed_on[0]


def _is_peft(model: Any) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


@cache
def _rows() -> Any:
    """Return a dataset. To make one, of which a fingerprint is computed, takes longer than the constructor."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})


def _arguments(module: ModuleType, trainer_class: Any) -> SimpleNamespace:
    """Return the defaults of the trainer's config, and what transformers would work out of the device."""
    config_class = getattr(module, trainer_class.__name__.replace("Trainer", "Config"))
    one_device: dict[str, Any] = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO")}
    one_device |= {"eval_strategy": "no", "deepspeed_plugin": None, "bf16": False, "gradient_checkpointing": False}
    # What a config works out after it was made; without a beta there is no reference, which would be loaded.
    of_method: dict[str, dict[str, Any]] = {"SFTConfig": {"loss_type": "nll"}}
    generates = {"steps_per_generation": 1, "generation_batch_size": 8, "beta": 0.0}
    of_method |= {"GRPOConfig": {"loss_type": "grpo", **generates}, "RLOOConfig": generates}
    return default_arguments(config_class, **one_device, **of_method.get(config_class.__name__, {}))


def _dora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=1, target_modules=["q_proj", "v_proj"], use_dora=True)


def _model(is_quantised: bool, with_adapter: bool) -> Any:
    """Return a Llama of one layer, which may be marked as loaded in 8 bits, and may have two adapters already."""
    model = deepcopy(_unmarked(with_adapter))
    (model.base_model.model if with_adapter else model).is_loaded_in_8bit = is_quantised
    return model


@cache
def _unmarked(with_adapter: bool) -> Any:
    """Return the model that is copied. To make one takes longer than the constructor of the trainer."""
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, num_labels=1))
    if not with_adapter:
        return model
    model = get_peft_model(model, _dora())
    model.add_adapter("beside", _dora())
    for weight in [weight for name, weight in model.named_parameters() if "lora_magnitude_vector" in name]:
        weight.data.fill_(0.7)
    return model
