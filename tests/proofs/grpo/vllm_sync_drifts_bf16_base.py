"""Train three steps of two micro-batches with LoRA on a bf16 Llama, and evaluate; vLLM is given the weights in between.

vLLM is replaced by a stand-in whose ``load_weights`` TRL's own method calls. The completions come from the model, so
that a run is the same whatever vLLM is given. The base model must be as it was to the last bit, and losses and
gradients those of a run that hands nothing over. vLLM must be given the base model plus the adapter. Wrong is where
PEFT's ``merge_adapter`` and ``unmerge_adapter`` alone take the base model.
"""

from __future__ import annotations

import copy
import tempfile
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"full": "Without an adapter nothing is merged."}

STEPS, MICRO_BATCHES = 3, 2
EQUIVALENT = {"applied twice": "the inner one finds the weights that the outer one has merged, and hands them on"}


def train() -> tiny.TrainingResult:
    outcomes, runs = {}, {}
    for name in ("GRPO", "RLOO"):
        if not hands_over(name):
            continue
        runs[name] = trainer = trained(name)
        # One for each step but the first, and one for the evaluation.
        if len(trainer.given) != STEPS or len(trainer.steps) != STEPS or not trainer.evaluations:
            raise AssertionError(f"vLLM was given {len(trainer.given)} states in {len(trainer.steps)} steps")
        outcomes[name] = judge(drift(trainer.model, trainer.base), right=0.0, wrong=drift(trainer.twin, trainer.base))
        if outcomes[name].verdict is Verdict.FIXED:
            compare(trainer, trained(name, hand_over=False))
    if not outcomes:
        return tiny.TrainingResult(absent("this release has no vLLM"))
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"the base models do not all stay: {outcomes}")
    return tiny.result_of_runs(runs, next(iter(outcomes.values())))


def unaffected() -> tiny.TrainingResult:
    """Train an adapter on a model in fp32, and a bf16 model without an adapter."""
    runs = {"fp32": trained("GRPO", dtype="float32")}
    if tiny.variant != "lora":
        runs["no adapter"] = trained("GRPO", adapter=False)
    return tiny.result_of_runs(runs, absent("the base model does not drift"))


def hands_over(name: str) -> bool:
    """Return whether this trainer hands weights over to vLLM, by a method of its own or by VLLMGeneration."""
    import trl
    from trl.trainer import grpo_trainer

    if name == "GRPO" and hasattr(grpo_trainer, "VLLMGeneration"):
        return True
    return hasattr(getattr(trl, f"{name}Trainer", None), "_move_model_to_vllm")


def losses_of(trainer: Any) -> list[float]:
    steps = [micro_batch for step in trainer.steps for micro_batch in step.micro_batches]
    return [micro_batch.loss for micro_batch in (*steps, *trainer.evaluations)]


def gradients_of(trainer: Any) -> dict[str, Any]:
    return {
        f"{number}.{name}": value for number, step in enumerate(trainer.steps) for name, value in step.gradients.items()
    }


def drift(model: Any, base: dict[str, Any]) -> float:
    weights = dict(model.named_parameters())
    return max(float((weights[name].detach().float() - value.float()).abs().max()) for name, value in base.items())


def compare(trainer: Any, expected: Any) -> None:
    """Compare what vLLM was given with the base model plus the adapter, and the training with one without vLLM."""
    import torch

    for given, right in zip(trainer.given, trainer.right, strict=True):
        wrong = [name for name in right if name not in given or not torch.equal(given[name], right[name])]
        if wrong or given.keys() != right.keys():
            raise AssertionError(f"vLLM was given other weights: {wrong}, {given.keys() ^ right.keys()}")
    gradients, expected_gradients = gradients_of(trainer), gradients_of(expected)
    differ = [name for name, value in gradients.items() if not torch.equal(value, expected_gradients[name])]
    differ += [name for name in trainer.base if not torch.equal(trainer.model.get_parameter(name), trainer.base[name])]
    if differ or losses_of(trainer) != losses_of(expected):
        raise AssertionError(f"handing weights over changes the training: {differ}")


def stand_in(trainer: Any) -> Any:
    """Let the trainer have a vLLM that copies what it is given, and return what hands the weights over."""
    weights: dict[str, Any] = {}

    def load(named: Any) -> None:
        weights.update({name: weight.detach().clone() for name, weight in named})

    runner = SimpleNamespace(model=SimpleNamespace(load_weights=load))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
    llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
    # From 0.16 to 0.17 vLLM is another process.
    client = SimpleNamespace(
        update_named_param=lambda name, weight: load([(name, weight)]), reset_prefix_cache=lambda: None
    )
    if hasattr(trainer, "_move_model_to_vllm"):
        vars(trainer).update({"llm": llm, "vllm_client": client, "vllm_mode": "colocate"})
        return trainer._move_model_to_vllm, weights
    from trl.generation import vllm_generation

    generation: Any = object.__new__(vllm_generation.VLLMGeneration)
    settings = {"mode": "colocate", "llm": llm, "is_fsdp_enabled": False, "enable_sleep_mode": False}
    vars(generation).update({"model": trainer.model, "accelerator": trainer.accelerator, **settings})
    if hasattr(vllm_generation, "DistributedBackend"):
        generation._dist = vllm_generation.DistributedBackend(trainer.accelerator)
    return generation.sync_weights, weights


def trained(name: str, *, hand_over: bool = True, dtype: str = "bfloat16", adapter: bool = True) -> Any:
    """Train and evaluate. The weights are handed over before each generation, except before the first step."""
    import torch
    import trl

    trainer_class = getattr(trl, f"{name}Trainer")
    generates = "_generate_and_score_completions"
    if not hasattr(trainer_class, generates):
        generates = "_prepare_inputs"

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step != self.last_step:
            self.last_step = self.state.global_step
            self.hand_over()
        return getattr(super(Recorder, self), generates)(*args, **kwargs)

    Recorder = type("Recorder", (tiny.stepwise(trainer_class),), {generates: generate})
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "optim": "sgd", "learning_rate": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0).to(getattr(torch, dtype))
        trainer: Any = tiny.grpo(
            Recorder,
            policy,
            getattr(trl, f"{name}Config"),
            peft_config=tiny.lora() if adapter else None,
            beta=0.5,
            per_device_eval_batch_size=4,
            **settings,
        )
        if adapter:
            tiny.set_adapters(trainer.model)
        prepare(trainer, hand_over=hand_over, adapter=adapter)
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(1)))
    return trainer


def prepare(trainer: Any, *, hand_over: bool, adapter: bool) -> None:
    """Let the trainer hand its weights over to the stand-in, and record them, and those of a twin by PEFT alone."""
    model = trainer.model
    trainer.given, trainer.right, trainer.last_step = [], [], 0
    trainer.base = {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" not in name}
    trainer.twin = copy.deepcopy(model)
    method, weights = stand_in(trainer)

    def record() -> None:
        if not hand_over:
            return
        if adapter:
            adapters = {name: weight for name, weight in model.state_dict().items() if "lora_" in name}
            trainer.twin.load_state_dict(adapters, strict=False)
            trainer.twin.merge_adapter()
            trainer.twin.unmerge_adapter()
            trainer.right.append(merged(model, trainer.base))
        weights.clear()
        method()
        trainer.given.append(dict(weights))

    trainer.hand_over = record


def merged(model: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return the base model plus its adapter, by the names that vLLM knows."""
    deltas = {
        f"{name}.base_layer.weight": layer.get_delta_weight("default").detach().float()
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): (
            weight.float().add(deltas[name]).to(weight.dtype) if name in deltas else weight
        )
        for name, weight in base.items()
    }
