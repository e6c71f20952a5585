"""Optimizer steps of the real GKDTrainer, and beside them what a formula gives for each of their micro-batches."""

from __future__ import annotations

import inspect
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .data import tokenizer
from .models import llama
from .steps import FormulaSteps
from .trainers import classes, config, trainer


@dataclass
class MicroBatch:
    """What one call of the loss was given and returned, and what each formula gives."""

    inputs: dict[str, Any]
    is_training: bool
    loss: float
    expected: dict[str, float]


Formula = Callable[[Mapping[str, Any], Any, "float | None"], Mapping[str, Any]]
"""``formula(batch, divergence, items)`` gives the losses of a micro-batch, by name. They can be differentiated.

``divergence`` is that of each predicted token, ``(rows, length - 1)``; ``items`` is what transformers has counted.
"""


def words(first: int, count: int) -> str:
    """Return a text of ``count`` words of the vocabulary, other ones for each ``first``."""
    return " ".join(f"w{(first + 7 * place) % 60}" for place in range(count))


def gkd_steps(
    formula: Formula,
    rows: Sequence[tuple[str, str]],
    *,
    generate: Callable[..., Any] | None = None,
    prepare: Callable[[Any], None] = lambda student: None,
    **settings: Any,
) -> FormulaSteps:
    """Train two optimizer steps of two micro-batches, then evaluate, and compute ``formula`` beside each micro-batch.

    ``rows`` are questions and answers. ``generate`` is that of the student and of the teacher. ``prepare(student)`` is
    called before the trainer is made.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    trainer_class, config_class = classes("GKD")
    run = FormulaSteps()

    class Recorder(trainer_class):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
            items = kwargs.get("num_items_in_batch")
            items = None if items is None else float(items)
            with torch.enable_grad():
                expected = formula(batch, _divergence(trainer_class, student, teacher, batch), items)
            if model.training:
                run.add(expected, trainable)
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            values = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(MicroBatch(batch, model.training, float(loss.detach()), values))
            return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            # transformers calls back before an optimizer step from 4.46 on only.
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    defaults |= {"beta": 0.5, "temperature": 1.0, "lmbda": 0.0, "max_new_tokens": 8, "max_length": 32}
    vocabulary = tokenizer()
    vocabulary.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    data = Dataset.from_list([{"messages": _messages(*row)} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        student, teacher = llama(folder, seed=0), llama(folder, seed=1)
        with torch.no_grad():
            # Otherwise both are so unsure that they hardly differ.
            for parameter in teacher.parameters():
                parameter.mul_(4)
        if generate is not None:
            student.generate = teacher.generate = generate
        prepare(student)
        run.trainer = trainer(
            Recorder,
            model=student,
            teacher_model=teacher,
            args=config(config_class, **{**defaults, **settings}),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            tokenizer=vocabulary,
            callbacks=[Steps()],
        )
        student = run.trainer.model
        trainable = {name: value for name, value in student.named_parameters() if value.requires_grad}
        with torch.no_grad():
            # An adapter begins at 0, and half of it without a gradient.
            for number, parameter in enumerate(trainable.values()):
                index = torch.arange(parameter.numel()).reshape(parameter.shape)
                parameter.add_(0.1 * torch.cos(number + index))
        run.measure_factor(run.trainer)
        # Who answers is drawn for each micro-batch.
        random.seed(0)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _divergence(trainer_class: Any, student: Any, teacher: Any, batch: Mapping[str, Any]) -> Any:
    """Return the divergence of each predicted token, arXiv:2306.13649 with beta = 1/2.

    The mixture is that of the probabilities; up to 0.11.2 TRL mixes the log-probs.
    """
    import torch

    def log_probs(model: Any) -> Any:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)

    with torch.no_grad():
        of_teacher = log_probs(teacher)
    of_student = log_probs(student)
    mixture = (of_student + of_teacher) / 2
    if "logsumexp" in inspect.unwrap(trainer_class.generalized_jsd_loss).__code__.co_names:
        mixture = ((of_student.exp() + of_teacher.exp()) / 2).log()
    return sum(0.5 * (side.exp() * (side - mixture)).sum(-1) for side in (of_student, of_teacher))
