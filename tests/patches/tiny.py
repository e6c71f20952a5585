"""Tiny models, tokenizers and data, and trainers that can be made in every release."""

from __future__ import annotations

import dataclasses
import inspect
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Seen:
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
    """A Mixtral of two layers and four experts. It comes from disk: later releases load the reference from there."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    path = Path(folder, f"mixtral-{seed}")
    MixtralForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


def llama(folder: str, *, seed: int) -> Any:
    """A dense Llama of two layers, from disk, as GRPO loads its reference from there since 0.18.0."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
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
    )
    path = Path(folder, f"llama-{seed}")
    LlamaForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


COMPLETION_LENGTHS = (2, 4, 8, 6)
"""Tokens of the completions of each group in ``grpo``, the end of sequence among them."""


def grpo(trainer_class: type, model: Any, **settings: Any) -> Any:
    """A GRPO trainer on groups of four completions that are always the same, and whose reward goes with their length.

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
            length = COMPLETION_LENGTHS[row % 4]
            words = [10 + (7 * row + 3 * place) % 50 for place in range(length - 1)]
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
        reward_funcs=reward,
        args=config(GRPOConfig, **{**usual, **settings}),
        train_dataset=Dataset.from_list([{"prompt": f"w{index} w{index + 1} w{index + 2}"} for index in range(8)]),
        tokenizer=words,
    )


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
    return config_class(**{key: value for key, value in {**usual, **wanted}.items() if key in known})


def trainer(trainer_class: type, **wanted: Any) -> Any:
    """A trainer; the tokenizer goes by the name that it has in this release."""
    known = inspect.signature(trainer_class.__init__).parameters
    if "tokenizer" in wanted and "processing_class" in known:
        wanted["processing_class"] = wanted.pop("tokenizer")
    return trainer_class(**wanted)


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
        if self.outputs is None:
            self.outputs = outputs

    def _gradient(self, name: str, gradient: Any) -> None:
        # The hook of a parameter that is used twice is called once, with the sum.
        self.gradients.setdefault(name, gradient.detach().clone())


def grpo_of_one_length(trainer_class: type, model: Any, peft_config: Any = None, **settings: Any) -> Any:
    """A GRPO trainer whose completions all have eight tokens, on one prompt, with an adapter if one is given.

    The mean over sequences is then the mean over tokens, and which prompt comes first is no part of what is compared:
    every release has the same loss.
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
        args=config(GRPOConfig, **{**usual, "beta": 1.0, **settings}),
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
