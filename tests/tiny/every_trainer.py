"""Two optimizer steps of two unequal micro-batches of any trainer that takes its step from transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .data import labelled, left_padding_tokenizer, preferences_of_several_lengths, tokenizer
from .gkd_steps import words
from .measuring import loss_of
from .models import llama
from .steps import gradients_of
from .trainers import classes, config, trainer

NAMES = ("DPO", "KTO", "ORPO", "CPO", "BCO", "Reward", "PRM", "GRPO", "SFT", "GKD")

Formula = Callable[[Any, Any, Mapping[str, Any]], Any]
"""``formula(policy, reference, batch)`` is the loss of a micro-batch, which can be differentiated."""


@dataclass
class Step:
    """The losses of the micro-batches and their gradients, and the gradient that the optimizer is given."""

    losses: list[float] = field(default_factory=list)
    of_losses: list[dict[str, Any]] = field(default_factory=list)
    accumulated: dict[str, Any] = field(default_factory=dict)


class Run:
    """A run of a real trainer, and its evaluation.

    ``formula`` replaces the loss that the trainer computes as what the gradients are compared with.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any] = llama,
        *,
        formula: Formula | None = None,
        **settings: Any,
    ) -> None:
        import torch
        from transformers import TrainerCallback

        trainer_class, config_class = classes(name)
        run, self.name = self, name
        self.steps, self.evaluated = [Step()], []

        class Recorder(trainer_class):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                # GRPO of 0.14.0 is given a list of rows.
                batch = dict(inputs) if isinstance(inputs, Mapping) else inputs
                result = super().compute_loss(model, inputs, *args, **kwargs)
                if not torch.is_grad_enabled():
                    run.evaluated.append(loss_of(result))
                    return result
                loss = result if formula is None else formula(self.model, self.ref_model, batch)
                run.steps[-1].losses.append(float(loss.detach()))
                parameters = dict(self.model.named_parameters())
                gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
                run.steps[-1].of_losses.append(dict(zip(parameters, gradients, strict=True)))
                return result

        class Gradients(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
                run.steps[-1].accumulated = gradients_of(model)
                run.steps.append(Step())

        defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
        defaults |= {"max_length": 32, "max_prompt_length": 16, "max_seq_length": 32, "dataset_text_field": "text"}
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            self.trainer = _made(name, Recorder, config_class, make, folder, {**defaults, **settings})
            self.trainer.add_callback(Gradients())
            # Reward's evaluation computes the loss of some rows once more, to print them.
            self.trainer.visualize_samples = lambda *args: None
            self.trainer.train()
            # GRPO has nothing to evaluate on.
            self.evaluation = self.trainer.evaluate()["eval_loss"] if self.trainer.eval_dataset else None
        self.steps.pop()

    @property
    def logged(self) -> list[float]:
        """The loss that is logged for each step."""
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def gradients(self) -> dict[str, Any]:
        """The gradients of all steps."""
        return {
            f"{self.name} {number} {key}": value
            for number, step in enumerate(self.steps)
            for key, value in step.accumulated.items()
        }


def _made(
    name: str, trainer_class: Any, config_class: Any, make: Callable[..., Any], folder: str, settings: Any
) -> Any:
    policy = make(folder, seed=0)
    vocabulary = tokenizer()
    vocabulary.bos_token = "<unk>"
    if name == "GRPO":
        return _grpo(trainer_class, config_class, policy, settings)
    if name == "GKD":
        vocabulary.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        settings["lmbda"] = 0.0
    if name in ("Reward", "PRM"):
        policy = _classifier(name)
        # Beside transformers up to 4.50 GRPOConfig of 0.17.0 makes this a field of every config.
        config_class = type(config_class.__name__, (config_class,), {"model_init_kwargs": None})
    data = _data(name, vocabulary)
    models = {"DPO": "ref_model", "KTO": "ref_model", "BCO": "ref_model", "GKD": "teacher_model"}
    return trainer(
        trainer_class,
        model=policy,
        args=config(config_class, **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        tokenizer=vocabulary,
        **({models[name]: make(folder, seed=1)} if name in models else {}),
    )


def _grpo(trainer_class: Any, config_class: Any, policy: Any, settings: Any) -> Any:
    """Return a GRPO trainer that completes its only prompt by other words in every call."""
    import torch
    from datasets import Dataset

    calls: list[Any] = []

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        # 0.14.0 leaves it to the model to answer a prompt several times.
        input_ids = input_ids.repeat_interleave(getattr(generation_config, "num_return_sequences", None) or 1, 0)
        calls.append(input_ids)
        first = [7 * row + 5 * len(calls) for row in range(len(input_ids))]
        rows = [[10 + (number + 3 * place) % 50 for place in range(4)] for number in first]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        return [float(row % 4) for row in range(len(completions))]

    policy.generate = generate
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    return trainer(
        trainer_class,
        model=policy,
        reward_funcs=reward,
        args=config(config_class, **{**settings, **sizes}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 16),
        tokenizer=left_padding_tokenizer(),
    )


def _classifier(name: str) -> Any:
    """Return a classifier of sequences with one label, or of tokens with two."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=0, num_labels=1 if name == "Reward" else 2, **sizes)
    if name == "Reward":
        return transformers.LlamaForSequenceClassification(config)
    config.classifier_dropout = 0.0
    return transformers.LlamaForTokenClassification(config)


def _data(name: str, vocabulary: Any) -> Any:
    """Return eight rows of several lengths, in the format of the trainer."""
    from datasets import Dataset

    numbers = range(8)
    if name == "SFT":
        return Dataset.from_list([{"text": words(number, 3 + number)} for number in numbers])
    if name == "GKD":
        rows = [(words(number, 2 + number % 3), words(number + 30, 2 + number)) for number in numbers]
        return Dataset.from_list([{"messages": _messages(*row)} for row in rows])
    if name == "PRM":
        completions = [[words(number + 3, 2 + number % 3), words(number + 5, 1 + number % 2)] for number in numbers]
        return Dataset.from_list(
            [
                {"prompt": words(number, 2), "completions": steps, "labels": [True, number % 2 == 0]}
                for number, steps in zip(numbers, completions, strict=True)
            ]
        )
    pairs = preferences_of_several_lengths()
    if name == "Reward":
        # 0.12.0 to 0.12.2 want the ids.
        return Dataset.from_list([_tokenized(row, vocabulary) for row in pairs])
    return labelled(pairs) if name in ("KTO", "BCO") else pairs


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _tokenized(row: Mapping[str, str], vocabulary: Any) -> dict[str, Any]:
    sides = {side: vocabulary(row["prompt"] + row[side]) for side in ("chosen", "rejected")}
    return {f"{name}_{side}": ids[name] for side, ids in sides.items() for name in ("input_ids", "attention_mask")}
