"""GRPO and RLOO switch the adapter of a ``PeftModel`` off for the reference, also one that has been trained before.

TRL 0.27.0 copies the adapter, as another one by the name of "ref" (pull request 4723). It is in every checkpoint then.
The wrappers keep a copy of what is trained beside the model. Where TRL asks for the model without its adapter, they put
the copy in its place for that time. So nothing more is saved, a resumed run has the reference of the adapter that the
script loads, and whatever PEFT knows is copied, such as ``modules_to_save``.

The copy belongs to the trainer, and is made when the constructor has moved and cast the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    constructed,
    default_arguments,
    quick_is_peft_model,
    scored_completions,
    single_process,
    stub_that_scores,
    tiny_tokenizer,
    trainer_and_config,
)

_COPY = "_weights_at_the_beginning"


@wrapper
def keep_the_weights_of_the_adapter(call: Call) -> None:
    """Copy what is trained of a PeftModel, if its divergence from the reference is."""
    from peft import PeftModel

    call()
    model = call["model"]
    if isinstance(model, PeftModel) and call["peft_config"] is None and call.trainer.beta != 0.0:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        vars(call.trainer)[_COPY] = {name: weight.data.clone() for name, weight in trained.items()}


@wrapper
def take_them_for_the_reference(call: Call) -> Any:
    """Have ``disable_adapter`` put the weights of the beginning in the place of those of now."""
    copy = vars(call.trainer).get(_COPY)
    if copy is None:
        return call()
    model = call.trainer.accelerator.unwrap_model(call.trainer.model)
    weights = {name: weight for name, weight in model.named_parameters() if name in copy}
    # ZeRO-3 and FSDP divide them among the GPUs.
    if [_kind(weight) for weight in weights.values()] != [_kind(value) for value in copy.values()]:
        return call()
    with shadowed(model, "disable_adapter", lambda: _in_place_of(weights, copy)):
        return call()


def _kind(weight: Any) -> tuple[Any, Any]:
    """Return the class and the shape of what a parameter holds. That of FSDP2 has the whole shape in another class."""
    return type(weight.data), weight.shape


@contextmanager
def _in_place_of(weights: Mapping[str, Any], copy: Mapping[str, Any]) -> Iterator[None]:
    """Give these weights the values of ``copy`` inside the block."""
    before = {name: weight.data for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            weight.data = copy[name].to(weight)
        yield
    finally:
        for name, weight in weights.items():
            weight.data = before[name]


def reference_has_the_adapter(module: ModuleType) -> Outcome:
    """Judge the gradient of the first of two completions of one token, whose log-prob is a weight of the adapter.

    The reference has the weights with which the trainer was made. With the bug it has no adapter.
    """
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    constructor = inspect.unwrap(trainer_class.__init__)
    if "reward_funcs" not in inspect.signature(constructor).parameters:
        return absent("this is another trainer of this name")
    if "ref" in constructor.__code__.co_consts:
        return absent("in this release the reference is a copy of the adapter")
    one_device: dict[str, Any] = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO")}
    one_device |= {"eval_strategy": "no", "deepspeed_plugin": None, "bf16": False, "world_size": 1, "process_index": 0}
    step = {"train_batch_size": 2, "steps_per_generation": 1, "generation_batch_size": 2, "num_generations": 2}
    settings = {**one_device, **step, "gradient_checkpointing": False, "beta": 1.0, "loss_type": "bnpo"}
    model, args, rows = _adapter(), default_arguments(config_class, **settings), SimpleNamespace(column_names=[])
    arguments = {"model": model, "reward_funcs": len, "train_dataset": rows, "processing_class": tiny_tokenizer()}
    # A self-test must not set the seed of the process.
    no_seed = shadowed(module, "set_seed", lambda *args, **kwargs: None)
    with single_process(module), quick_is_peft_model(module), no_seed:
        trainer = constructed(trainer_class, args=args, **arguments)
    if trainer.ref_model is not None:
        return absent("in this release the reference is a copy of the model")
    scorer = stub_that_scores(module, ([5], [6]), (0.0, 0.0), model=model, reference=model, **settings)
    vars(trainer).update(vars(scorer), ref_model=None, current_gradient_accumulation_steps=1)
    trainer._get_per_token_logps = lambda *args, **kwargs: model.weight * model.is_on
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (model.weight * model.is_on, model.weight)
    model.weight.data *= 2
    trainer.compute_loss(model, scored_completions(trainer)).backward()
    # The rewards are equal. The divergence is a part of GRPO's loss, and of the rewards of RLOO.
    by_token = trainer_class.__name__ == "GRPOTrainer"
    right, wrong = ((1 - math.e) / 2, (1 - math.e**2) / 2) if by_token else (1.0, 2.0)
    return judge(float(model.weight.grad[0]), right=right, wrong=wrong)


def _adapter() -> Any:
    """Return a PeftModel of two weights."""
    import torch
    from peft import PeftModel

    class Adapter(PeftModel):  # type: ignore[misc]
        config, is_gradient_checkpointing, is_on = SimpleNamespace(_name_or_path=""), False, 1.0

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.tensor([[-1.0], [-3.0]]))
            self.warnings_issued: dict[str, bool] = {}
            self.add_model_tags = self.get_base_model = lambda *tags: self
            self.disable_adapter = lambda: shadowed(self, "is_on", 0.0)

    return Adapter()
