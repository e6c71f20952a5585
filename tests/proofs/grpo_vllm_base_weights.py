"""The proof: two steps of GRPOTrainer with LoRA and vLLM, and the weights that vLLM samples the second step from.

vLLM is replaced by a Llama of its own that loads the weights it is given and generates from them. The loss and the
gradients are those of the second step, which is trained on what was generated.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {"full": "Without an adapter nothing is merged."}


class StandIn:
    """The part of ``vllm.LLM`` that TRL 0.15 uses."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.loaded: list[dict[str, Any]] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def load_weights(self, weights: Any) -> None:
        self.loaded.append({name: weight.detach().clone() for name, weight in weights})
        self.model.load_state_dict(self.loaded[-1])

    def generate(self, prompts: list[str], **kwargs: Any) -> list[Any]:
        """Return seven words and the end: the first word depends on the row, the others are the most probable ones."""
        import torch

        answers = []
        for row, prompt in enumerate(prompts):
            ids = [*tiny.tokenizer()(prompt).input_ids, 10 + row]
            begin = len(ids) - 1
            while len(ids) - begin < 7:
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1]
                # The first three words are padding, the end and the unknown word.
                ids.append(3 + int(logits[3:].argmax()))
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*ids[begin:], 1])]))
        return answers


def vllm() -> dict[str, ModuleType]:
    """Return the modules of vLLM in which TRL 0.15 replaces a method of the worker."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.worker", "vllm.worker.worker")}
    modules["vllm"].worker = modules["vllm.worker"]
    modules["vllm.worker"].worker = modules["vllm.worker.worker"]
    modules["vllm.worker.worker"].Worker = type(
        "Worker", (), {"_assert_memory_footprint_increased_during_profiling": None}
    )
    return modules


def train() -> tiny.TrainingResult:
    from trl.trainer import grpo_trainer

    if not hasattr(grpo_trainer.GRPOTrainer, "_move_model_to_vllm") or hasattr(grpo_trainer, "VLLMClient"):
        return tiny.TrainingResult(absent("vLLM is given its weights another way in this release"))
    steps: list[tiny.FirstStep] = []
    adapter_weights: list[float] = []

    class WeightTransferRecorder(tiny.measured(grpo_trainer.GRPOTrainer)):
        def _move_model_to_vllm(self):
            layers = [module for module in self.model.modules() if hasattr(module, "get_delta_weight")]
            deltas = [layer.get_delta_weight("default").detach() for layer in layers]
            adapter_weights.append(max(float(delta.abs().max()) for delta in deltas))
            super()._move_model_to_vllm()
            steps.append(tiny.FirstStep(self.model))

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        policy = tiny.llama(folder, seed=0)
        base = {name: weight.clone() for name, weight in policy.state_dict().items()}
        for name, value in {
            "LLM": StandIn,
            "SamplingParams": SimpleNamespace,
            "is_vllm_available": lambda: True,
        }.items():
            stack.enter_context(shadowed(grpo_trainer, name, value))
        for name, module in vllm().items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        trainer = tiny.grpo_of_one_length(
            WeightTransferRecorder,
            policy,
            tiny.lora(),
            use_vllm=True,
            vllm_device="cpu",
            max_steps=2,
            learning_rate=1e-2,
        )
        tiny.set_adapters(trainer.model)
        trainer.train()
        (weights,) = trainer.llm.loaded
    merged = max(float((weights[name] - base[name]).abs().max()) for name in base)
    unmerged = trainer.model.base_model.model.state_dict()
    change = max(float((unmerged[name] - weight).abs().max()) for name, weight in base.items() if name in unmerged)
    if change > 1e-6:
        raise AssertionError(f"the base model has changed by {change}")
    outcome = judge(merged, right=adapter_weights[0], wrong=0.0)
    return tiny.TrainingResult(outcome, trainer.losses[1], steps[0].gradients)
