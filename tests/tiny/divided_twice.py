"""Micro-batches of a stub of any trainer, with an accelerator that transformers has made and accelerate not set up."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import shadowed
from trl_hotfix.model import Target
from trl_hotfix.testing import default_arguments, stub_trainer

from .steps import acts


class DividedRun:
    """The loss of a micro-batch is a weight times its number, ``by_tokens`` divided by the tokens of the step, 4."""

    def __init__(
        self, target: Target, *, steps: int = 2, by_tokens: bool = False, distributed_type: str = "NO", **settings: Any
    ) -> None:
        import torch
        import transformers.trainer
        from transformers import Trainer, TrainingArguments
        from transformers.trainer_pt_utils import AcceleratorConfig

        self.target, self.tokens, self._distributed_type = target, 4 if by_tokens else None, distributed_type
        self.weight = torch.nn.Parameter(torch.tensor(0.5))
        self.known_in_loss: list[int] = []
        self.known_to_the_engine: list[int] = []
        self.computed: list[Any] = []
        arguments = {
            "gradient_accumulation_steps": steps,
            "accelerator_config": AcceleratorConfig(),
            "fsdp_plugin_args": None,
            "mixed_precision": "no",
            "device": torch.device("cpu"),
            "n_gpu": 0,
        }
        self.trainer = stub_trainer(
            getattr(import_module(target.module), target.attribute.partition(".")[0]),
            default_arguments(TrainingArguments, **{**arguments, **settings}),
            model=torch.nn.Linear(1, 1),
            optimizer=None,
            compute_loss=self._compute_loss,
            compute_loss_func=None,
            model_accepts_loss_kwargs=by_tokens,
            state=SimpleNamespace(global_step=0),
            maybe_activation_offload_context=nullcontext(),
            _build_accelerator_args=lambda **settings: settings,
            _prepare_context_parallel_inputs=lambda model, inputs: (nullcontext, inputs),
            _prepare_inputs=lambda inputs: inputs,
            _get_liger_zero3_lm_head_gather_ctx=lambda model: nullcontext(),
            _metrics={"train": defaultdict(list)},
            _current_train_step_time=0.0,
            **dict.fromkeys(("_buffered_on_policy_flags", "_buffered_inputs"), None),
            **dict.fromkeys(("_step", "_buffer_step", "_off_policy_loss_total", "_off_policy_step_equiv"), 0),
        )
        with shadowed(transformers.trainer, "Accelerator", self._accelerator):
            Trainer.create_accelerator_and_postprocess(self.trainer)

    @property
    def known(self) -> int:
        """The number of micro-batches that accelerate knows of."""
        return int(self.trainer.accelerator.gradient_accumulation_steps)

    @property
    def acts(self) -> int | None:
        """In how many micro-batches the patch with this target acted."""
        patch_id = "transformers-divides-gradients-twice"
        others = "transformers-divides-gradients-of-others-twice"
        found = [acts(each, self.target.name, self.trainer) for each in (patch_id, others)]
        return next((count for count in found if count is not None), None)

    def micro_batch(self, number: float, in_step: int) -> Any:
        """Run a micro-batch of a step of ``in_step``, and return what is logged."""
        self.trainer.current_gradient_accumulation_steps = in_step
        return self.trainer.training_step(self.trainer.model, {"number": number}, self.tokens)

    def gradient(self, number: float, in_step: int) -> float:
        self.weight.grad = None
        self.micro_batch(number, in_step)
        assert self.weight.grad is not None
        return float(self.weight.grad)

    def _compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        self.computed.append((model, inputs, num_items_in_batch))
        self.known_in_loss.append(self.known)
        return self.weight * inputs["number"] / (num_items_in_batch or 1)

    def _accelerator(self, *, gradient_accumulation_plugin: Any, **settings: Any) -> Any:
        from accelerate import Accelerator
        from accelerate.state import GradientState

        accelerator: Any = object.__new__(Accelerator)
        gradient_state: Any = object.__new__(GradientState)
        vars(gradient_state).update(plugin_kwargs=gradient_accumulation_plugin.to_kwargs(), sync_gradients=True)
        state = SimpleNamespace(
            distributed_type=self._distributed_type, deepspeed_plugin=None, fsdp_plugin=None, is_main_process=True
        )
        engine = SimpleNamespace(backward=self._engine_backward)
        vars(accelerator).update(
            state=state, gradient_state=gradient_state, scaler=None, deepspeed_engine_wrapped=engine
        )
        return accelerator

    def _engine_backward(self, loss: Any, **options: Any) -> None:
        self.known_to_the_engine.append(self.known)
        loss.backward()
