"""Tiny models, tokenizers and data, and trainers that can be made in every release."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass
class TrainingResult:
    """What one training run showed: the self-test's kind of outcome, the first loss, and the first gradients."""

    outcome: Any
    loss: float | None = None
    gradients: dict[str, Any] = field(default_factory=dict)


def tokenizer() -> Any:
    """60 words; no beginning-of-sequence token, since releases differ in where they put one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def mixtral(folder: str, *, seed: int, coefficient: float) -> Any:
    """A Mixtral of two layers and four experts, with a router auxiliary loss."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": coefficient}
    return _from_disk(folder, "Mixtral", seed, output_router_logits=True, **settings)


def llama(folder: str, *, seed: int) -> Any:
    """A dense Llama of two layers."""
    return _from_disk(folder, "Llama", seed)


def _from_disk(folder: str, kind: str, seed: int, **settings: Any) -> Any:
    """Later releases load the reference from where the policy was, GRPO since 0.18.0."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **settings,
    )
    path = Path(folder, f"{kind.lower()}-{seed}")
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    return _in_variant(transformers.AutoModelForCausalLM.from_pretrained(path))


COMPLETION_LENGTHS = (2, 4, 8, 6)
"""Tokens of the completions of each group in ``grpo``, the end of sequence among them."""

PROMPTS = tuple(f"w{index} w{index + 1} w{index + 2}" for index in range(8))
"""The prompts of ``grpo``."""


def grpo(
    trainer_class: type,
    model: Any,
    config_class: type | None = None,
    lengths: tuple[int, ...] = COMPLETION_LENGTHS,
    *,
    reward_funcs: Any = None,
    prompts: Sequence[Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer on groups of four completions that are always the same, and whose reward goes with their length.

    It is GRPO's, unless ``config_class`` is another's. ``reward_funcs`` and ``prompts`` take the place of these rewards
    and of eight prompts of three words.

    What a release samples, and how, is then no part of what is compared. Nor is how it scales the rewards of a group:
    their standard deviation is 1 (0.22.0 and 0.22.1 scale when they should not, TRL pull request 3992).
    """
    import statistics

    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = []
        for row in range(len(input_ids)):
            length = lengths[row % len(lengths)]
            words = [10 + (7 * (row % 4) + 3 * place) % 50 for place in range(length - 1)]
            rows.append([*words, 1, *[0] * (8 - length)])
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        # What follows the rewards is a shuffle of the batch.
        torch.manual_seed(0)
        return [len(completion.split()) * one for completion in completions]

    # TRL divides by the deviation plus 1e-4.
    one = (1 - 1e-4) / statistics.stdev(COMPLETION_LENGTHS)
    model.generate = generate
    words = tokenizer()
    words.padding_side = "left"
    usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
    return trainer(
        trainer_class,
        model=model,
        reward_funcs=reward if reward_funcs is None else reward_funcs,
        args=config(config_class or GRPOConfig, **{**usual, **settings}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts or PROMPTS]),
        tokenizer=words,
    )


def one_step_of_unequal_lengths(**settings: Any) -> TrainingResult:
    """One step of the real GRPOTrainer: does its loss weigh every sequence the same, which is right, or every token?

    Policy and reference are the same, so the loss of a token is -advantage.
    """
    from trl import GRPOTrainer

    from trl_hotfix.authoring import judge

    steps: list[tuple[float, float, float]] = []

    class Measured(GRPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            # 0.14 computes the advantages in here.
            if "advantages" in inputs:
                of_each, lengths = -inputs["advantages"], inputs["completion_mask"].sum(1)
                per_token = (of_each * lengths).sum() / lengths.sum()
                steps.append((float(loss.detach()), float(of_each.mean()), float(per_token)))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = llama(folder, seed=0)
        seen = FirstStep(policy)
        grpo(Measured, policy, **settings).train()
    loss, right, wrong = steps[0]
    return TrainingResult(judge(loss, right=right, wrong=wrong), loss, seen.gradients)


def preferences() -> Any:
    from datasets import Dataset

    rows = [
        {
            "prompt": f"w{index} w{index + 1} w{index + 2}",
            "chosen": f" w{index + 3} w{index + 5} w{index + 7}",
            "rejected": f" w{index + 4} w{index + 6}",
        }
        for index in range(8)
    ]
    return Dataset.from_list(rows)


def lora() -> Any:
    """A LoRA configuration for the attention of the tiny models."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def labelled() -> Any:
    """Single completions, good and bad in turn, as KTO takes them."""
    from datasets import Dataset

    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in preferences()
        for side in ("chosen", "rejected")
    ]
    return Dataset.from_list(rows)


def preference_log_probs(model: Any, batch: Any) -> tuple[Any, Any]:
    """Summed log-probs of the chosen and of the rejected completions, each of shape ``(batch,)``, without TRL's code.

    A batch has whole sequences with labels up to 0.11, prompts and completions up to 0.28, and all sequences with a
    mask of the completions, the chosen before the rejected, from 0.29 on.
    """
    import torch

    def summed(ids: Any, attention: Any, counted: Any) -> Any:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return (log_probs * counted[:, 1:]).sum(1)

    if "completion_mask" in batch:
        both = summed(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        return tuple(both.chunk(2))
    found = []
    for side in ("chosen", "rejected"):
        ids, attention = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        if f"{side}_labels" in batch:
            found.append(summed(ids, attention, batch[f"{side}_labels"] != -100))
            continue
        prompt, its = batch["prompt_input_ids"], batch["prompt_attention_mask"]
        counted = torch.cat([torch.zeros_like(its), attention], 1)
        found.append(summed(torch.cat([prompt, ids], 1), torch.cat([its, attention], 1), counted))
    return found[0], found[1]


def dpo_loss(beta: float, policy: tuple[Any, Any], reference: tuple[Any, Any]) -> float:
    """Equation 7 of the paper (arXiv:2305.18290): ``-log sigmoid`` of beta times the difference of the two margins."""
    import torch

    margins = [chosen - rejected for chosen, rejected in (policy, reference)]
    return float(-torch.nn.functional.logsigmoid(beta * (margins[0] - margins[1])).mean())


def config(config_class: type, **wanted: Any) -> Any:
    """An instance of a TRL config; what this release has no field for is left out."""
    known = {each.name for each in dataclasses.fields(config_class)}
    usual = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    if variant == "compiled":
        usual |= {"torch_compile": True, "torch_compile_backend": compiler}
    return config_class(**{key: value for key, value in {**usual, **wanted}.items() if key in known})


def trainer(trainer_class: type, **wanted: Any) -> Any:
    """A trainer; the tokenizer goes by the name that it has in this release."""
    known = parameters(trainer_class)
    if "tokenizer" in wanted and "processing_class" in known:
        wanted["processing_class"] = wanted.pop("tokenizer")
    if variant in ("lora", "full"):
        wanted.pop("peft_config", None)
    if variant == "lora":
        wanted.pop("ref_model", None)  # the model without its adapter is the reference
    made = trainer_class(**wanted)
    trained.add("lora" if hasattr(made.model, "peft_config") else "full")
    fingerprints.append(getattr(made.train_dataset, "_fingerprint", ""))
    return made


def parameters(trainer_class: type) -> set[str]:
    """What the trainer takes; a class that was moved or renamed hands all on to the one that it is now."""
    every = (set(inspect.signature(each.__init__).parameters) for each in trainer_class.__mro__)
    return next(its for its in every if its != {"self", "args", "kwargs"})


def one_process() -> None:
    """The environment that a launcher of one process would make."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launched.items():
        os.environ.setdefault(name, value)


def deepspeed(stage: int) -> dict[str, Any]:
    """A DeepSpeed config for one process on the CPU."""
    import deepspeed.ops

    # A C++ op for several processes on one host: compiling it takes minutes and one process has no use for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    one_process()
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def one_group(trainer_class: type) -> type:
    """The trainer with an optimizer of one parameter group.

    transformers makes a second, empty one of a model without biases, which DeepSpeed drops; torch's schedulers then
    count one group too few.
    """

    class OneGroup(trainer_class):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            import torch

            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    return OneGroup


class FirstStep:
    """Notes a model's first outputs and the gradients of its first backward pass, from outside."""

    def __init__(self, model: Any) -> None:
        self.outputs: Any = None
        self.gradients: dict[str, Any] = {}
        model.register_forward_hook(self._outputs, with_kwargs=True)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # frozen beneath an adapter
            parameter.register_hook(lambda gradient, name=name: self._gradient(name, gradient))

    def _outputs(self, model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        import torch

        # Without gradients it is a pass for the reference, by a model that has an adapter.
        if self.outputs is None and torch.is_grad_enabled():
            self.outputs = outputs

    def _gradient(self, name: str, gradient: Any) -> None:
        # The hook of a parameter that is used twice is called once, with the sum.
        self.gradients.setdefault(name, gradient.detach().clone())


def measured(trainer_class: type) -> Any:
    """A subclass of the trainer that records its calls of ``compute_loss`` and the gradients of its first step.

    The class has ``losses``, one number for each call; ``batches``, the inputs of each call, their tensors cloned;
    ``keywords``, the keyword arguments of each call; and, once ``train()`` has begun, ``step``: a ``FirstStep``.
    Call this once for each run: two runs of one class share its records.
    """

    class Measured(trainer_class):  # type: ignore[misc, valid-type]
        losses: ClassVar[list[float]] = []
        batches: ClassVar[list[dict[str, Any]]] = []
        keywords: ClassVar[list[dict[str, Any]]] = []
        step: ClassVar[FirstStep | None] = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            type(self).step = self.step or FirstStep(self.model)
            return super().train(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the call: some releases take columns out of the batch.
            tensors = {key: value.clone() for key, value in inputs.items() if hasattr(value, "clone")}
            self.batches.append({**inputs, **tensors})
            self.keywords.append(dict(kwargs))
            result = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    return Measured


variant = ""
"""Set by ``tests/bench/variants.py``: ``compiled``, ``lora``, ``full``, or ``eager``, with which it compares."""

compiler = "aot_eager"
"""The backend of ``torch.compile``."""

trained: set[str] = set()
"""What has been trained: models in ``full``, adapters (``lora``)."""

fingerprints: list[str] = []
"""Of the datasets that the trainers made by ``trainer`` have prepared: their keys in the cache of ``datasets``."""


def _in_variant(model: Any) -> Any:
    """The model with an adapter, if that is the variant. As PEFT makes it, it adds nothing until it is trained."""
    if variant != "lora":
        return model
    from peft import get_peft_model

    made = get_peft_model(model, lora())
    same_adapter(made)
    return made


def same_adapter(model: Any) -> None:
    """The weights that PEFT draws at random, and not after the same numbers in every release, are the same ones."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.any():
            index = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.data.copy_(torch.sin(index).reshape(parameter.shape))


def precomputed_dpo(**settings: Any) -> Any:
    """A DPO config with steps so large that one of them shows, and a reference that is computed beforehand."""
    from trl import DPOConfig

    usual = {"learning_rate": 1.0, "optim": "sgd", "beta": 0.5, "max_length": 16, "max_prompt_length": 8}
    return config(DPOConfig, precompute_ref_log_probs=True, **{**usual, **settings})


def two_steps_of_precomputed_dpo() -> tuple[Any, TrainingResult]:
    """The real DPOTrainer without ``ref_model``, and what its second step showed.

    In the first step policy and reference are equal, in the second they are not, and the loss says with which reference
    it was computed: with itself it is log 2. The dataset is one batch, so that the shuffle, which the precomputing
    shifts, plays no part. An adapter is switched off for the reference, so that the loss of a model with one is right,
    and what the bug does is a forward pass too many.
    """
    import math

    import torch
    from trl import DPOTrainer

    from trl_hotfix.authoring import judge

    seen: dict[str, Any] = {}
    references: list[int] = []

    class Measured(DPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # What is left at the end are the gradients of the last step.
            step.gradients.clear()
            reference = preference_log_probs(untouched, inputs)
            seen["right"] = dpo_loss(0.5, preference_log_probs(model, inputs), reference)
            seen["reference_of_untouched_model"] = float(reference[0].sum())
            references.clear()
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen["reference_forwards"] = len(references)
            found = [value for key, value in inputs.items() if key.startswith("ref") and key.endswith("chosen_logps")]
            seen["reference_in_batch"] = float(sum(each.sum() for each in found)) if found else None
            seen["measured"] = float(result.detach())
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = (llama(folder, seed=0) for _ in range(2))
        step = FirstStep(policy)
        policy.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else references.append(1))
        words = tokenizer()
        # 0.9.6 puts it before every prompt, also where there is none.
        words.bos_token = "<unk>"
        data = preferences().select(range(2))
        made = trainer(Measured, model=policy, args=precomputed_dpo(max_steps=2), train_dataset=data, tokenizer=words)
        made.train()
    loss = seen["measured"]
    if variant == "lora":
        if not math.isclose(loss, seen["right"], rel_tol=1e-5):
            raise AssertionError(f"the adapter was on in the reference: {seen}")
        outcome = judge(float(seen["reference_forwards"]), loss=loss, right=0.0, wrong=1.0)
    else:
        outcome = judge(seen.pop("measured"), right=seen.pop("right"), wrong=math.log(2), **seen)
    if seen["reference_forwards"] != (1 if outcome.verdict.value == "reproduced" else 0):
        raise AssertionError(f"the loss is right and the reference is computed again, or the other way round: {seen}")
    if seen["reference_in_batch"] is not None and not math.isclose(
        seen["reference_in_batch"], seen["reference_of_untouched_model"], rel_tol=1e-6
    ):
        raise AssertionError(f"what was precomputed is not of the untouched model: {seen}")
    return made, TrainingResult(outcome, loss, dict(step.gradients))


def one_step_of_moe_dpo(*, adapter: bool = False, **settings: Any) -> TrainingResult:
    """One step of a tiny Mixtral with the real DPOTrainer, or of an adapter on it.

    Policy and reference have the same weights, so that the DPO loss of the first step is log 2, and what is over is
    the auxiliary term. 1.8.0 takes the coefficient from the arguments only, so it is given there too.
    """
    import math

    from trl import DPOConfig, DPOTrainer

    from trl_hotfix.authoring import judge

    coefficient = 0.5
    losses: list[float] = []

    class Measured(one_group(DPOTrainer)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    words = tokenizer()
    # 0.9.6 needs one and puts it at the beginning, later releases if it is not there yet.
    words.bos_token = words.eos_token
    wanted = {"max_length": 16, "max_prompt_length": 8, "router_aux_loss_coef": coefficient, **settings}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (mixtral(folder, seed=0, coefficient=coefficient) for _ in range(2))
        made = trainer(
            Measured,
            model=policy,
            args=config(DPOConfig, **wanted),
            train_dataset=preferences().map(lambda row: {"prompt": f"{words.bos_token} {row['prompt']}"}),
            tokenizer=words,
            **({"peft_config": lora()} if adapter else {"ref_model": reference}),
        )
        if adapter:
            same_adapter(made.model)
        seen = FirstStep(made.model)
        made.train()
    aux_loss = float(seen.outputs.aux_loss.detach())
    right = math.log(2) + coefficient * aux_loss
    outcome = judge(losses[0], right=right, wrong=math.log(2), coefficient=coefficient, aux_loss=aux_loss)
    return TrainingResult(outcome, losses[0], seen.gradients)


@dataclass
class DpoRun:
    """One step and an evaluation of a DPO trainer, and what came of them."""

    trainer: Any
    loss: float
    gradients: dict[str, Any]
    metrics: dict[str, float]
    batch: dict[str, Any]

    def difference(self, other: DpoRun) -> float:
        """The largest difference of the loss, of any gradient and of any metric; infinite if one has others."""
        if self.gradients.keys() != other.gradients.keys() or self.metrics.keys() != other.metrics.keys():
            return float("inf")
        gradients = [float((its - other.gradients[name]).abs().max()) for name, its in self.gradients.items()]
        metrics = [abs(its - other.metrics[name]) for name, its in self.metrics.items()]
        return max(abs(self.loss - other.loss), *gradients, *metrics)


def dpo_run(model: Any, reference: Any, **settings: Any) -> DpoRun:
    """Train one step on preferences of several lengths, then evaluate. ``settings`` are of ``DPOConfig``.

    Trained with LoRA if there is no ``reference``. From 0.14.0 to 0.28.0.
    """
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    # LoRA starts with random weights.
    torch.manual_seed(0)
    losses: list[float] = []
    batches: list[dict[str, Any]] = []

    class Measured(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batches.append(dict(inputs))
            result = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    rows = [
        {
            "prompt": " ".join(f"w{index + place}" for place in range(2 + index % 3)),
            "chosen": "".join(f" w{(7 * index + 3 * place) % 60}" for place in range(2 + index % 2)),
            "rejected": "".join(f" w{(5 * index + 11 * place) % 60}" for place in range(3 + index % 3)),
        }
        for index in range(8)
    ]
    data = Dataset.from_list(rows)
    wanted = {"model": model, "ref_model": reference, "tokenizer": tokenizer()}
    if reference is None:
        wanted["peft_config"] = lora()
    made = trainer(
        Measured,
        **wanted,
        args=config(DPOConfig, **{"beta": 0.5, "max_length": 32, "max_prompt_length": 16, **settings}),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
    )
    step = FirstStep(made.model)
    made.train()
    logged = {**made.state.log_history[0], **made.evaluate()}
    kept = ("loss", "rewards/", "logps/", "logits/")
    metrics = {name: value for name, value in logged.items() if any(each in name for each in kept)}
    return DpoRun(made, losses[0], step.gradients, metrics, batches[0])


def grpo_of_one_length(
    trainer_class: type, model: Any, peft_config: Any = None, config_class: type | None = None, **settings: Any
) -> Any:
    """A GRPO trainer whose completions all have eight tokens, on one prompt, with an adapter if one is given.

    The mean over sequences is then the mean over tokens, and which prompt comes first is no part of what is compared:
    every release has the same loss. The trainer is GRPO's, unless ``config_class`` is another's.
    """
    import statistics

    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        # 0.14.0 leaves it to the model to answer a prompt several times.
        input_ids = input_ids.repeat_interleave(getattr(generation_config, "num_return_sequences", None) or 1, 0)
        rows = [[*(10 + (7 * (row % 4) + 3 * place) % 50 for place in range(7)), 1] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        torch.manual_seed(0)
        return [row % 4 * one for row in range(len(completions))]

    # As in `grpo`: no release scales the rewards of a group, whether it should or not.
    one = (1 - 1e-4) / statistics.stdev(range(4))
    model.generate = generate
    words = tokenizer()
    words.padding_side = "left"
    usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
    return trainer(
        trainer_class,
        model=model,
        reward_funcs=reward,
        args=config(config_class or GRPOConfig, **{**usual, "beta": 1.0, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 8),
        tokenizer=words,
        peft_config=peft_config,
    )


def set_adapters(model: Any) -> None:
    """Give every LoRA matrix values of its own, not the 0 that half of them begin with."""
    import torch

    for number, weight in enumerate(weight for name, weight in model.named_parameters() if "lora_" in name):
        weight.data = 0.5 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape)


def quantised(model: Any) -> Any:
    """``model``, which says that it is loaded in 8 bits. It is not: bitsandbytes is nowhere on the bench.

    Not in 4 bits, where transformers asks bitsandbytes for the number of parameters.
    """
    model.is_loaded_in_8bit = True
    return model


def qwen2_moe(folder: str, *, seed: int, coefficient: float) -> Any:
    """A Qwen2-MoE of two layers, four experts and a shared one, from disk."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    path = Path(folder, f"qwen2-moe-{seed}")
    Qwen2MoeForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


def warnings_of(make: Any) -> tuple[Any, list[str]]:
    """What ``make()`` returns, and what trl_hotfix says meanwhile."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Handler()
    logging.getLogger("trl_hotfix").addHandler(handler)
    try:
        return make(), said
    finally:
        logging.getLogger("trl_hotfix").removeHandler(handler)


@dataclass
class SftRun:
    """The first step of an SFT trainer."""

    trainer: Any
    loss: float
    gradients: dict[str, Any]
    batch: dict[str, Any]

    def difference(self, other: SftRun) -> float:
        """The largest difference of the loss and of any gradient."""
        assert self.gradients
        assert self.gradients.keys() == other.gradients.keys()
        gradients = [float((its - other.gradients[name]).abs().max()) for name, its in self.gradients.items()]
        return max(abs(self.loss - other.loss), *gradients)


def chat_tokenizer(template: str | None = None) -> Any:
    """``tokenizer``, with a chat template: a word for the role, the content and an end of sequence."""
    words = tokenizer()
    words.chat_template = template or (
        "{% for message in messages %}"
        "{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> "
        "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
    )
    return words


def sft_step(rows: Any, *, words: Any = None, streaming: bool = False, given: Any = None, **settings: Any) -> SftRun:
    """One step of the real SFTTrainer on all ``rows`` at once. ``given`` is for the trainer, ``settings`` its config's.

    ``rows`` are dicts, and ``streaming`` makes an ``IterableDataset`` of them.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    seen: dict[str, Any] = {}

    class Measured(SFTTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model, inputs, *args, **kwargs):
            batch = {key: value for key, value in inputs.items() if hasattr(value, "shape")}
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen.setdefault("batch", batch)
            seen.setdefault("loss", float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    def as_dataset(rows: Any) -> Any:
        dataset = Dataset.from_list(rows)
        return dataset.to_iterable_dataset() if streaming else dataset

    wanted = dict(given or {})
    if isinstance(wanted.get("eval_dataset"), dict):
        wanted["eval_dataset"] = {name: as_dataset(its) for name, its in wanted["eval_dataset"].items()}
    usual = {"per_device_train_batch_size": len(rows), "max_seq_length": 32, "dataset_text_field": "text"}
    # 0.15 makes the config a part of the fingerprint of the dataset: no names that are new each time.
    usual |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        # LoRA starts with random weights.
        model = llama(folder, seed=0)
        torch.manual_seed(0)
        step = FirstStep(model)
        made = trainer(
            Measured,
            model=model,
            args=config(SFTConfig, **{**usual, **settings}),
            train_dataset=as_dataset(rows),
            tokenizer=words if words is not None else chat_tokenizer(),
            **wanted,
        )
        made.train()
    return SftRun(made, seen["loss"], step.gradients, seen["batch"])


def several(runs: dict[str, SftRun]) -> tuple[float, dict[str, Any]]:
    """The sum of the losses, and all gradients, each named after its run."""
    gradients = {f"{name} {each}": its for name, run in runs.items() for each, its in run.gradients.items()}
    return sum(run.loss for run in runs.values()), gradients


def classes(name: str) -> tuple[Any, Any]:
    """The trainer and its config, or twice None; some have moved to ``trl.experimental``, others are gone."""
    import contextlib
    from importlib import import_module

    folder = {"OnlineDPO": "online_dpo", "NashMD": "nash_md"}.get(name, name.lower())
    for module in (f"trl.experimental.{folder}", "trl"):
        with contextlib.suppress(AttributeError, ImportError):
            found = import_module(module)
            return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")
    return None, None


ONLINE_LENGTHS = (5, 3, 4, 2)
"""Tokens of the completions in ``online_dpo``, the end of sequence among them; they are padded to the longest."""


def online_completions(rows: int) -> Any:
    """What ``online_dpo`` generates, ``(rows, 5)``: always the same, and padded with 0 after the end of sequence."""
    import torch

    made = []
    for row in range(rows):
        length = ONLINE_LENGTHS[row % len(ONLINE_LENGTHS)]
        words = [10 + (11 * row + 3 * place) % 50 for place in range(length - 1)]
        made.append([*words, 1, *[0] * (max(ONLINE_LENGTHS) - length)])
    return torch.tensor(made)


def online_dpo(trainer_class: type, config_class: type, model: Any, **settings: Any) -> Any:
    """A trainer of OnlineDPO, XPO or NashMD, whose reference is the model as it begins, on one prompt.

    Of the two completions of a prompt the first is the better one, if there is a judge or it is OnlineDPO. OnlineDPO's
    completions are those of ``online_completions``; the other two sample.
    """
    import torch
    from datasets import Dataset

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        return torch.cat([input_ids, online_completions(len(input_ids))], dim=1)

    class Judge:
        def judge(self, prompts: Any, completions: Any, return_scores: bool = False, **kwargs: Any) -> Any:
            return [0.75 if return_scores else 0] * len(prompts)

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(completions) - row) for row in range(len(completions))]

    def scoring(model: Any) -> Any:
        from transformers import LlamaForSequenceClassification

        torch.manual_seed(2)
        return LlamaForSequenceClassification(model.config)

    words = tokenizer()
    words.padding_side = "left"
    samples = hasattr(trainer_class, "_compute_losses")
    if not samples:
        model.generate = generate
    known = inspect.signature(trainer_class.__init__).parameters
    judged: dict[str, Any] = {"judge": Judge()}
    if "judge" not in known:
        judged = {"reward_funcs": scoring(model) if samples else reward}
        judged |= {name: words for name in known if samples and name.startswith("reward_processing_class")}
    return trainer(
        trainer_class,
        model=model,
        **judged,
        args=config(config_class, **{"max_new_tokens": 5, "max_length": 16, "beta": 0.5, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 16),
        tokenizer=words,
    )


def online_log_probs(model: Any, rows: int, *, padding: bool = False) -> Any:
    """Log-probs of the tokens of ``online_completions`` after the prompt, without TRL's code.

    They are 0 for what is padding, unless ``padding`` is asked for.
    """
    import torch

    completions = online_completions(rows)
    prompt = torch.tensor([tokenizer()("w1 w2 w3")["input_ids"]] * rows)
    lengths = torch.tensor([ONLINE_LENGTHS[row % len(ONLINE_LENGTHS)] for row in range(rows)])
    counted = torch.arange(completions.shape[1]) < lengths[:, None]
    ids = torch.cat([prompt, completions], dim=1)
    seen = torch.cat([torch.ones_like(prompt), counted.long()], dim=1)
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, completions[..., None])[..., 0] * (counted | padding)


def gpt_neo(folder: str, *, seed: int) -> Any:
    """A GPT-Neo of two layers: it looks its positions up in a table, and its attention has the names of Llama's."""
    return _from_disk(folder, "GPTNeo", seed, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
