"""AdaLoRA moves ranks to the layers that need them only if somebody calls ``update_and_allocate`` after each step.

PEFT leaves the call to the training loop, between the step of the optimizer and ``zero_grad``. Neither transformers nor
TRL makes it. A callback does, at ``on_optimizer_step``. It is the last one, so it sees whether one of the user's has
made the call, and leaves it to that one.

PEFT prunes by setting singular values to zero, and notes in the config which ones remain. A config with this note has
PEFT save fewer rows than the model has, and a resumed run cannot load them. So the note is in the config only during
PEFT's own call. The zeros say the same: a resumed run reads them before its first step moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, judge, wrapper
from ...model import Outcome
from ...testing import base_for_adapters, stub_trainer

_is_first = Once()


@wrapper
def allocate_ranks_after_each_step(call: Call) -> Any:
    """Give the trainer of an AdaLoRA adapter the callback, once. DeepSpeed and FSDP keep the weights elsewhere."""
    trainer, act = call.trainer, call.act_later()
    tuner = getattr(trainer.model, "base_model", None)
    is_sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if getattr(tuner, "rankallocator", None) is not None and not is_sharded and _is_first(trainer):
        trainer.add_callback(_callback(_Allocation(tuner, act)))
    return call()


class _Allocation:
    """What PEFT does to an adapter after each step of a run."""

    def __init__(self, tuner: Any, act: Callable[[], None]) -> None:
        self._tuner, self._act = tuner, act
        self._allocator = tuner.rankallocator
        self._config = tuner.peft_config[tuner.trainable_adapter_name]
        # The last step at which ranks move. From then on what is pruned stays so.
        self._last = self._config.total_step - self._config.tfinal
        self._remaining: dict[str, list[bool]] | None = None
        self._newest: Any = None
        # With a note the ranks differ already, and with these ranks there is nothing to prune.
        can_prune = self._allocator.target_bgt < self._allocator.init_bgt
        self._is_ours = can_prune and self._config.rank_pattern is None

    def begin(self) -> None:
        """Find what a checkpoint has pruned. If that is too little, the next step prunes the rest."""
        infix = f"lora_E.{self._tuner.trainable_adapter_name}"
        values = {name: value for name, value in self._tuner.model.named_parameters() if infix in name}
        remaining = {name: (value != 0).flatten().tolist() for name, value in values.items()}
        is_pruned = 0 < sum(map(sum, remaining.values())) <= self._allocator.target_bgt
        self._remaining = remaining if is_pruned else None

    def after_step(self, step: int, *, was_skipped: bool) -> None:
        """Allocate ranks after this step, which is the first or a later one. Not in a step that float16 skips."""
        self._is_ours = self._is_ours and self._last_average() is self._newest
        if not self._is_ours or (was_skipped and step < self._last):
            return
        self._act()
        ends = step >= self._last and (self._remaining is None or (step == self._last and self._newest is not None))
        without = self._without_gradient()
        try:
            if ends and self._newest is None:
                self._allocator.update_ipt(self._tuner.model)
            self._config.rank_pattern = self._remaining
            self._tuner.update_and_allocate(step if step < self._last else self._last if ends else self._last + 1)
        finally:
            self._remaining, self._config.rank_pattern = self._config.rank_pattern, None
            for weight in without:
                weight.grad = None
        self._newest = self._last_average()

    def _last_average(self) -> Any:
        """Return a tensor that is another one after each call of PEFT's method."""
        return next(reversed(self._allocator.exp_avg_ipt.values()), None)

    def _without_gradient(self) -> list[Any]:
        """Return the weights that this step has not reached, with gradients of zero: PEFT asks for those of all."""
        import torch

        adapter, weights = self._tuner.trainable_adapter_name, self._tuner.model.named_parameters()
        without = [value for name, value in weights if "lora_" in name and adapter in name and value.grad is None]
        for weight in without:
            weight.grad = torch.zeros_like(weight)
        return without


def _callback(allocation: _Allocation) -> Any:
    from transformers import TrainerCallback

    class AllocateRanks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            allocation.begin()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            was_skipped = getattr(kwargs.get("optimizer"), "step_was_skipped", False)
            allocation.after_step(state.global_step + 1, was_skipped=was_skipped)

    return AllocateRanks()


def ranks_are_pruned(module: ModuleType) -> Outcome:
    """Count the singular values of a matrix of rank 2 after the step that leaves one of them."""
    import torch
    from peft import AdaLoraConfig, get_peft_model
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    config = AdaLoraConfig(init_r=2, target_r=1, total_step=1, target_modules=["q_proj"])
    model = get_peft_model(base_for_adapters(), config)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.grad = torch.arange(1.0, weight.numel() + 1).reshape(weight.shape)
    handler = CallbackHandler([DefaultFlowCallback], model, None, None, None)
    switches = dict.fromkeys(("is_deepspeed_enabled", "is_fsdp_enabled"), False)
    made = {"optimizer": "made by the user", "callback_handler": handler, **switches}
    trainer = stub_trainer(trainer_class, SimpleNamespace(), model=model, **made)
    trainer.create_optimizer()
    handler.on_optimizer_step(trainer.args, SimpleNamespace(global_step=0), None)
    values = model.base_model.model.self_attn.q_proj.lora_E["default"]
    return judge(int((values != 0).sum()), right=1, wrong=2)
