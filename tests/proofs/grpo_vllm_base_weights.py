"""The proof: two steps of GRPOTrainer with LoRA and vLLM. What does vLLM sample the second step from?

vLLM is a stand-in at the border of the process: a Llama of its own that takes the weights it is given and answers with
what these make of the prompt. The loss and the gradients are those of the second step, which is trained on that answer.
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
    """What TRL 0.15 uses of ``vllm.LLM``."""

    def __init__(self, model: str, **others: Any) -> None:
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

    def generate(self, prompts: list[str], **others: Any) -> list[Any]:
        """Seven words, of which the first is the row's own and the others the most probable ones, and the end."""
        import torch

        answers = []
        for row, prompt in enumerate(prompts):
            ids = [*tiny.tokenizer()(prompt).input_ids, 10 + row]
            begin = len(ids) - 1
            while len(ids) - begin < 7:
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1]
                # Neither padding nor an end.
                ids.append(3 + int(logits[3:].argmax()))
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*ids[begin:], 1])]))
        return answers


def vllm() -> dict[str, ModuleType]:
    """The modules of vLLM in which TRL 0.15 replaces a method of the worker."""
    made = {name: ModuleType(name) for name in ("vllm", "vllm.worker", "vllm.worker.worker")}
    made["vllm"].worker = made["vllm.worker"]
    made["vllm.worker"].worker = made["vllm.worker.worker"]
    made["vllm.worker.worker"].Worker = type(
        "Worker", (), {"_assert_memory_footprint_increased_during_profiling": None}
    )
    return made


def train() -> tiny.TrainingResult:
    from trl.trainer import grpo_trainer as leaf

    if not hasattr(leaf.GRPOTrainer, "_move_model_to_vllm") or hasattr(leaf, "VLLMClient"):
        return tiny.TrainingResult(absent("vLLM is given its weights another way in this release"))
    losses: list[float] = []
    steps: list[tiny.FirstStep] = []
    added: list[float] = []

    class Measured(leaf.GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

        def _move_model_to_vllm(self):
            layers = [module for module in self.model.modules() if hasattr(module, "get_delta_weight")]
            added.append(max(float(each.get_delta_weight("default").detach().abs().max()) for each in layers))
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
            stack.enter_context(shadowed(leaf, name, value))
        for name, module in vllm().items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        trainer = tiny.grpo_of_one_length(
            Measured, policy, tiny.lora(), use_vllm=True, vllm_device="cpu", max_steps=2, learning_rate=1e-2
        )
        tiny.set_adapters(trainer.model)
        trainer.train()
        (weights,) = trainer.llm.loaded
    away = max(float((weights[name] - base[name]).abs().max()) for name in base)
    unmerged = trainer.model.base_model.model.state_dict()
    left = max(float((unmerged[name] - weight).abs().max()) for name, weight in base.items() if name in unmerged)
    if left > 1e-6:
        raise AssertionError(f"the base model has changed by {left}")
    return tiny.TrainingResult(judge(away, right=added[0], wrong=0.0), losses[1], steps[0].gradients)
