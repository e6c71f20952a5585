"""Make each trainer of a release, on a tiny model. For scripts that run inside one release.

Models are written to the folder ``models`` of the working directory. ``settings`` are fields of the trainer's config.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from bench.proving.release import alone
from tiny import classes


def dpo(**settings: Any) -> Any:
    return _preference("DPO", tiny.preferences(), ref_model=tiny.llama("models", seed=1), **settings)


def kto(**settings: Any) -> Any:
    return _preference("KTO", tiny.labelled(), ref_model=tiny.llama("models", seed=1), **settings)


def orpo(**settings: Any) -> Any:
    return _preference("ORPO", tiny.preferences(), **settings)


def cpo(**settings: Any) -> Any:
    return _preference("CPO", tiny.preferences(), **settings)


def _preference(name: str, data: Any, ref_model: Any = None, *, on_disk: bool = False, **settings: Any) -> Any:
    if on_disk:
        from datasets import load_from_disk

        folder = tempfile.mkdtemp(dir=".")
        data.save_to_disk(folder)
        data = load_from_disk(folder)
    words = tiny.tokenizer()
    # 0.9.6 needs a bos_token, and puts it before every prompt.
    words.bos_token = words.eos_token
    trainer_class, config_class = classes(name)
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        args=tiny.config(config_class, **{"max_length": 16, "max_prompt_length": 8, **settings}),
        train_dataset=data,
        eval_dataset=data,
        tokenizer=words,
        **({"ref_model": ref_model} if ref_model is not None else {}),
    )


def sft(**settings: Any) -> Any:
    from datasets import Dataset

    trainer_class, config_class = classes("SFT")
    data = Dataset.from_list([{"text": f"w{row} w{row + 1} w{row + 2}"} for row in range(8)])
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        args=tiny.config(config_class, **{"max_seq_length": 16, "dataset_text_field": "text", **settings}),
        train_dataset=data,
        tokenizer=tiny.tokenizer(),
    )


def gkd(**settings: Any) -> Any:
    from datasets import Dataset

    words = tiny.tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    trainer_class, config_class = classes("GKD")
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        teacher_model=tiny.llama("models", seed=1),
        args=tiny.config(config_class, **{"max_new_tokens": 4, "max_length": 16, **settings}),
        train_dataset=Dataset.from_list([{"messages": messages}] * 8),
        tokenizer=words,
    )


def scoring(seed: int) -> Any:
    """Return a classifier with one output."""
    from transformers import AutoModelForSequenceClassification

    tiny.llama("models", seed=seed)
    return AutoModelForSequenceClassification.from_pretrained(f"models/llama-{seed}", num_labels=1)


def reward(config_class: type | None = None, **settings: Any) -> Any:
    from datasets import Dataset

    words = tiny.tokenizer()
    rows = tiny.preferences()
    if "tokenizer" in release_parameters("Reward"):
        # Up to 0.11 the trainer takes tokenized data.
        ids = {side: words([row["prompt"] + row[side] for row in rows]) for side in ("chosen", "rejected")}
        rows = Dataset.from_dict({f"{key}_{side}": columns[key] for side, columns in ids.items() for key in columns})
    trainer_class, default_config_class = classes("Reward")
    return tiny.trainer(
        trainer_class,
        model=scoring(2),
        args=tiny.config(
            config_class or default_config_class, **{"max_length": 16, "remove_unused_columns": False, **settings}
        ),
        train_dataset=rows,
        tokenizer=words,
    )


def reward_with_plain_arguments(**settings: Any) -> Any:
    from transformers import TrainingArguments

    return reward(TrainingArguments, **settings)


def release_parameters(name: str) -> set[str]:
    return tiny.parameters(classes(name)[0])


def grpo(**settings: Any) -> Any:
    trainer_class, config_class = classes("GRPO")
    return tiny.grpo(trainer_class, tiny.llama("models", seed=0), config_class, **settings)


def rloo(**settings: Any) -> Any:
    trainer_class, config_class = classes("RLOO")
    if "reward_funcs" in release_parameters("RLOO"):
        return tiny.grpo(trainer_class, tiny.llama("models", seed=0), config_class, **settings)
    return of_own_loop("RLOO", rloo_k=2, **settings)


def ppo(**settings: Any) -> Any:
    import trl

    return of_own_loop("PPOv2" if hasattr(trl, "PPOv2Trainer") else "PPO", **settings)


def of_own_loop(name: str, **settings: Any) -> Any:
    """Return a trainer with a training loop of its own: PPO, and RLOO up to 0.21."""
    from datasets import Dataset

    trainer_class, config_class = classes(name)
    known = release_parameters(name)
    words = tiny.tokenizer()
    words.padding_side = "left"
    usual = {
        "total_episodes": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "local_rollout_forward_batch_size": 2,
        "num_ppo_epochs": 1,
        "response_length": 3,
        "num_sample_generations": 0,
        "max_steps": -1,
    }
    models = {"policy": tiny.llama("models", seed=0), "ref_policy": tiny.llama("models", seed=1)}
    if "policy" not in known:
        models = {"model": models["policy"], "ref_model": models["ref_policy"]}
    if "value_model" in known:
        models["value_model"] = scoring(3)
    data = Dataset.from_list([{"input_ids": [5, 6, 7]}] * 4)
    return tiny.trainer(
        trainer_class,
        **{"config" if "config" in known else "args": tiny.config(config_class, **{**usual, **settings})},
        **models,
        reward_model=scoring(2),
        train_dataset=data,
        eval_dataset=data,
        tokenizer=words,
    )


def online_dpo(**settings: Any) -> Any:
    from datasets import Dataset

    words = tiny.tokenizer()
    words.padding_side = "left"
    known = release_parameters("OnlineDPO")
    trainer_class, config_class = classes("OnlineDPO")
    reward: dict[str, Any] = {"reward_model": scoring(2), "reward_processing_class": words}
    if "reward_funcs" in known:
        reward = {"reward_funcs": lambda completions, **kwargs: [float(len(completion)) for completion in completions]}
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        ref_model=tiny.llama("models", seed=1),
        args=tiny.config(
            config_class, **{"max_new_tokens": 3, "max_length": 16, "missing_eos_penalty": 1.0, **settings}
        ),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 8),
        tokenizer=words,
        **{key: value for key, value in reward.items() if key in known},
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "DPO": dpo,
    "SFT": sft,
    "KTO": kto,
    "ORPO": orpo,
    "CPO": cpo,
    "Reward": reward,
    "Reward with TrainingArguments": reward_with_plain_arguments,
    "GRPO": grpo,
    "RLOO": rloo,
    "PPO": ppo,
    "OnlineDPO": online_dpo,
    "GKD": gkd,
}


def is_available(name: str) -> bool:
    """Return whether this release has this trainer."""
    import trl

    if name == "PPO" and hasattr(trl, "PPOv2Trainer"):
        return True
    # Later releases accept TrainingArguments too, and fail at the first step.
    if name.endswith("TrainingArguments") and trl.__version__ != "0.9.6":
        return False
    trainer_class, _ = classes(name.partition(" ")[0])
    from transformers import Trainer

    return trainer_class is not None and issubclass(trainer_class, Trainer)


class MessageRecorder(logging.Handler):
    """Record the messages that trl_hotfix logs, from a level on."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        logging.getLogger("trl_hotfix").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def note_gradients(trainer: Any, lengths: list[str]) -> None:
    """Have each step of the trainer add the squared length of its gradient to ``lengths``, with all its digits."""
    trainer.create_optimizer()

    def note(optimizer: Any, *arguments: Any) -> None:
        squares = [float(p.grad.double().pow(2).sum()) for p in trainer.model.parameters() if p.grad is not None]
        lengths.append(repr(sum(squares)))

    trainer.optimizer.register_step_pre_hook(note)


def answer_each(run: Callable[[str], Any], out: str, *cases: str) -> None:
    """Write the answer of each case to a file. Each runs in a fork; the first word of a case is its trainer."""
    for case in cases:
        classes(case.split(" ")[0])
    answers = {case: alone(lambda case=case: run(case), 120) for case in cases}  # type: ignore[misc]
    Path(out).write_text(json.dumps(answers), encoding="utf-8")
