"""Train two steps of two micro-batches, each with its own completions, and evaluate, with a vLLM that sleeps.

vLLM is replaced by a Llama of its own. Its weights are 0 when it has slept, and those of the checkpoint when it is told
to reload, and it generates from what it has. In each generation its weights are compared with the model's (right), and
with the checkpoint's where TRL reloads it last, or 0 where it does not (wrong). Losses, gradients and weights must be
those of a run whose vLLM never sleeps, and is given the model's weights by the proof.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import trl

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {"lora": "TRL's own method merges the adapter, and vllm-sync-drifts-bf16-base proves what it hands over."}
EQUIVALENT = {"applied twice": "the inner wrapper finds a new step, or its method takes the place of the outer one's"}
MUTANTS_ON = ("0.27.2",)

STEPS, MICRO_BATCHES = 2, 2


class StandIn:
    """The part of ``vllm.LLM`` that TRL calls."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.checkpoint = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.awake = {"weights", "kv_cache"}
        self.trained: Any = None
        self.is_given = False
        self.seen: list[tuple[float, float]] = []
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def sleep(self, level: int = 1) -> None:
        assert level == 2
        for weight in self.model.parameters():
            weight.data.zero_()
        self.awake.clear()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ("weights", "kv_cache"))

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        assert method == "reload_weights"
        self.load_weights(self.checkpoint.items())
        return [None]

    def load_weights(self, weights: Any) -> None:
        # 0.28.0 hands weights over while they are asleep, and they are lost.
        if "weights" in self.awake:
            for name, weight in weights:
                self.model.get_parameter(name).data.copy_(weight)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[Any], **kwargs: Any) -> list[Any]:
        """Return four to seven words and the end: row and call tell the first, the others are the most likely."""
        import torch

        assert self.awake == {"weights", "kv_cache"}
        if self.is_given:
            self.load_weights(self.trained.named_parameters())
        own, trained = dict(self.model.named_parameters()), dict(self.trained.named_parameters())
        stale = self.checkpoint if reloads() else {name: 0 * weight for name, weight in self.checkpoint.items()}
        self.seen.append((distance(own, trained), distance(stale, trained)))
        answers = []
        for row, prompt in enumerate(prompts):
            prompt_ids = tiny.tokenizer()(prompt).input_ids if isinstance(prompt, str) else prompt["prompt_token_ids"]
            number = row + 3 * len(self.seen)
            ids = [*prompt_ids, 10 + number]
            while len(ids) - len(prompt_ids) < 4 + number % 4:
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1]
                # The first three words are padding, the end and the unknown word.
                ids.append(3 + int(logits[3:].argmax()))
            ids = [*ids[len(prompt_ids) :], 1]
            chances = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in ids]
            completion = SimpleNamespace(token_ids=ids, logprobs=chances)
            answers.append(SimpleNamespace(prompt_token_ids=list(prompt_ids), outputs=[completion]))
        return answers


def distance(weights: dict[str, Any], others: dict[str, Any]) -> float:
    return max(float((weights[name] - value).detach().abs().max()) for name, value in others.items())


def holder_of(name: str) -> ModuleType:
    """Return the module that has vLLM generate for this trainer."""
    module = sys.modules[getattr(trl, f"{name}Trainer").__module__]
    return sys.modules["trl.generation.vllm_generation"] if hasattr(module, "VLLMGeneration") else module


def has_generation() -> bool:
    return hasattr(sys.modules[trl.GRPOTrainer.__module__], "VLLMGeneration")


def reloads() -> bool:
    """Tell whether vLLM is told to reload its checkpoint, as it is from 0.26.0 on."""
    return (
        has_generation() or "collective_rpc" in inspect.unwrap(trl.GRPOTrainer._generate_single_turn).__code__.co_names
    )


def methods() -> list[str]:
    """Return the trainers whose vLLM drops its weights when it sleeps."""
    if not hasattr(trl, "GRPOTrainer"):
        return []
    method = getattr(trl.GRPOTrainer, "_generate_single_turn", None)
    wakes_weights = method is not None and "weights" in inspect.unwrap(method).__code__.co_consts
    if not wakes_weights and not has_generation():
        return []
    # RLOO of 0.25 and 0.26 lets vLLM answer conversations only.
    return ["GRPO"] if trl.__version__.startswith(("0.25.", "0.26.")) else ["GRPO", "RLOO"]


@contextmanager
def vllm(module: ModuleType) -> Iterator[None]:
    """Let the module have the names of vLLM, which some releases import when they generate."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params")}
    vars(modules["vllm"])["__version__"] = "0.12.0"
    names = {"SamplingParams": SimpleNamespace, "StructuredOutputsParams": SimpleNamespace}
    vars(modules["vllm.sampling_params"]).update(names)
    known = {**names, "vllm": modules["vllm"], "LLM": StandIn, "is_vllm_available": lambda *args, **kwargs: True}
    with ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(shadowed(module, name, value))
        for name in modules:
            stack.callback(sys.modules.pop, name)
        sys.modules.update(modules)
        yield


def steps(name: str, *, given: bool = False, **settings: Any) -> Any:
    """Return a trainer that has trained and evaluated. With ``given``, vLLM has the right weights whatever TRL does."""
    import torch

    defaults = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": not given}
    defaults |= {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_generation": 1}
    defaults |= {"optim": "sgd", "learning_rate": 0.5, "beta": 0.5, "per_device_eval_batch_size": 4}
    if name == "GRPO":
        # 1.10.0 multiplies the divergence by the ratio, unless it is told not to.
        defaults |= {"vllm_importance_sampling_correction": False, "loss_type": "grpo", "use_bias_correction_kl": False}
    trainer_class = tiny.stepwise(getattr(trl, f"{name}Trainer"))
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, vllm(holder_of(name)):
        policy = tiny.llama(folder, seed=0)
        trainer = tiny.grpo(
            trainer_class,
            policy,
            getattr(trl, f"{name}Config"),
            prompts=["w1 w2 w3"] * 16,
            **{**defaults, **settings},
        )
        # It tells vLLM of one process that it is the only one.
        os.environ.clear()
        os.environ.update(environment)
        with torch.no_grad():
            for number, weight in enumerate(policy.parameters()):
                weight.add_(0.1 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape))
        trainer.engine = getattr(getattr(trainer, "vllm_generation", trainer), "llm", None)
        if trainer.engine is not None:
            trainer.engine.trained, trainer.engine.is_given = policy, given
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(1)))
    return trainer


def judged(name: str, trainer: Any) -> Any:
    """Judge by how far the weights that vLLM generates with are from the model's, in all generations together."""
    seen = trainer.engine.seen
    # Each micro-batch has its own completions, and the evaluation has some.
    assert len(trainer.steps) == STEPS
    assert len(seen) == STEPS * MICRO_BATCHES + 1, seen
    assert min(stale for _, stale in seen) > 1e-3, seen
    hands_over_last = holder_of(name).__name__ != "trl.generation.vllm_generation"
    # The evaluation's generation is of a step of its own.
    is_first = [number % MICRO_BATCHES == 0 for number in range(len(seen))]
    wrong = [0.0 if hands_over_last and first else stale for first, (_, stale) in zip(is_first, seen, strict=True)]
    outcome = judge(sum(own for own, _ in seen), right=0.0, wrong=sum(wrong))
    if outcome.verdict is Verdict.FIXED:
        assert max(own for own, _ in seen) == 0, seen
        compare(trainer, steps(name, given=True))
    else:
        assert [own for own, _ in seen] == wrong, (seen, wrong)
    return outcome


def compare(trainer: Any, expected: Any) -> None:
    differences = [abs(loss - right) for loss, right in zip(losses_of(trainer), losses_of(expected), strict=True)]
    differences += [step.difference(right.gradients) for step, right in zip(trainer.steps, expected.steps, strict=True)]
    differences.append(distance(trainer.model.state_dict(), expected.model.state_dict()))
    assert max(differences) < 1e-6, f"losses, gradients and weights differ by up to {max(differences)}"


def losses_of(trainer: Any) -> list[float]:
    training = [micro_batch for step in trainer.steps for micro_batch in step.micro_batches]
    return [micro_batch.loss for micro_batch in (*training, *trainer.evaluations)]


def result(runs: dict[str, Any], outcome: Any) -> tiny.TrainingResult:
    """Return the losses of the first run's steps, and all gradients. Some releases divide those of evaluations."""
    of_all = tiny.result_of_runs(runs, outcome)
    steps_of_first = next(iter(runs.values())).steps
    of_all.loss = sum(micro_batch.loss for step in steps_of_first for micro_batch in step.micro_batches)
    return of_all


def train() -> tiny.TrainingResult:
    names = methods()
    if not names:
        return tiny.TrainingResult(absent("vLLM keeps its weights when it sleeps"))
    runs = {name: steps(name) for name in names}
    outcomes = {name: judged(name, run) for name, run in runs.items()}
    assert len({outcome.verdict for outcome in outcomes.values()}) == 1, outcomes
    return result(runs, outcomes["GRPO"])


def unaffected() -> tiny.TrainingResult:
    """Train with a vLLM that does not sleep, and with sleep mode, but without vLLM."""
    settings = ({"vllm_enable_sleep_mode": False}, {"use_vllm": False})
    runs = {f"{name} {number}": steps(name, **own) for name in methods() for number, own in enumerate(settings)}
    return result(runs, absent("vLLM does not sleep"))
