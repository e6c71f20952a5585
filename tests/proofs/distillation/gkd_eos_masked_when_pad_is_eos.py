"""Train two optimizer steps of two micro-batches with the real GKDTrainer and a tokenizer that pads with its end.

The student writes the completions, or the teacher. Prompts and completions are unequally long, and turns end within
the prompts. Losses and accumulated gradients are compared with the divergence over the completions, ends included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import distillation, grpo_steps

OVERLAYS = ()
PARITY = True

ID = "gkd-eos-masked-when-pad-is-eos"
END, BETA = 1, 0.5


def train() -> tiny.TrainingResult:
    trainer_class, config_class = tiny.classes("GKD")
    if trainer_class is None:
        return tiny.TrainingResult(absent("this release has no GKD"))
    runs = {"student": _run(lmbda=1.0)}
    if hasattr(config_class, "seq_kd"):
        runs["teacher"] = _run(lmbda=0.0, seq_kd=True)
    outcomes = [grpo_steps.judged_steps(run) for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"not all completions are treated alike: {outcomes}")
    # Up to 0.11 nobody but the student writes, so that its run alone is compared.
    result = runs["student"].first_step
    result.outcome = outcomes[0]
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with another padding token."""
    with tiny.counted(ID) as counts:
        result = _run(pad_token="<pad>", lmbda=1.0).result
        assert not counts().acted, "the wrapper acts where the padding is another token"
    result.outcome = absent("the padding is another token")
    return result


def _run(pad_token: str = "<eos>", **settings: Any) -> tiny.FormulaSteps:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    trainer_class, config_class = tiny.classes("GKD")
    run = tiny.FormulaSteps()

    # Up to 0.11.2 TRL mixes the log-probs of student and teacher: another loss.
    mixes_logs = "interpolated_log_probs" in trainer_class.generalized_jsd_loss.__code__.co_varnames

    class RecordSteps(trainer_class):  # type: ignore[misc, valid-type]
        if mixes_logs:
            generalized_jsd_loss = staticmethod(_mean_divergence)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = dict(inputs)
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            expected = _losses(student, teacher, inputs)
            run.add(expected, trainable)
            numbers = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(grpo_steps.MicroBatch(inputs, True, float(loss.detach()), None, numbers, {}))
            return loss

    words = tiny.chat_tokenizer()
    words.pad_token = pad_token
    with tempfile.TemporaryDirectory() as folder:
        student, teacher = (tiny.llama(folder, seed=seed) for seed in range(2))
        for model in (student, teacher):
            _differentiate(model)
        student.generate = teacher.generate = _padded_with(words.pad_token_id)
        student.generation_config.eos_token_id = END
        defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
        defaults |= {"beta": BETA, "temperature": 1.0, "max_new_tokens": 12, "max_length": 32}
        trainer = tiny.trainer(
            RecordSteps,
            model=student,
            teacher_model=teacher,
            args=tiny.config(config_class, **{**defaults, **settings}),
            train_dataset=_conversations(),
            tokenizer=words,
        )
        # From 1.7.0 on the loss is divided by a number of the dataset's tokens, if there is one.
        trainer.model_accepts_loss_kwargs = False
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainable = {name: value for name, value in student.named_parameters() if value.requires_grad}
        with torch.no_grad():
            # An adapter begins at 0, and half of it without a gradient.
            for number, parameter in enumerate(trainable.values()):
                index = torch.arange(parameter.numel()).reshape(parameter.shape)
                parameter.add_(0.1 * torch.cos(number + index))
        run.measure_factor(trainer)
        # transformers 4.44 has no callback before a step.
        hook = register_optimizer_step_pre_hook(lambda *args: run.end_step(trainable))
        try:
            trainer.train()
        finally:
            hook.remove()
    run.trainer = trainer
    return run


def _mean_divergence(student_logits: Any, teacher_logits: Any, labels: Any, **unused: Any) -> Any:
    """Return the mean over the labels of the divergence, arXiv:2306.13649, equation 1, for this beta of 0.5."""
    probs = [logits.softmax(-1) for logits in (student_logits, teacher_logits)]
    mixture = sum(probs) / 2
    divergence = sum(BETA * (of * (of / mixture).log()).sum(-1) for of in probs)
    return divergence[labels != -100].mean()


def _differentiate(model: Any) -> None:
    """Make the logits of this model large, so that the end of a completion weighs."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)


def _conversations() -> Any:
    """Return conversations of three turns, of which the first is longer in every other one."""
    from datasets import Dataset

    turns = [("user", "w1 w2" + " w9 w8" * (number % 2)) for number in range(8)]
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": role, "content": content}
                    for role, content in (turn, ("assistant", "w5"), ("user", "w6"), ("assistant", "w3 w4"))
                ]
            }
            for turn in turns
        ]
    )


def _padded_with(padding: int) -> Callable[..., Any]:
    """Return a ``generate`` whose unequally long completions are padded with this token."""
    complete = distillation.growing_completions()

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        generated = complete(input_ids, **kwargs)
        completions = generated.sequences[:, input_ids.shape[1] :]
        completions[completions == 0] = padding
        return generated

    return generate


def _losses(student: Any, teacher: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean divergence over the completions up to their first ends, and over what is no padding token."""
    import torch

    tokens, length = inputs["input_ids"], inputs["prompts"].shape[1]
    ends = (tokens[:, length:] == END).int().argmax(1)
    kept = torch.arange(tokens.shape[1] - length) <= ends.unsqueeze(1)
    masks = {"right": torch.cat([inputs["prompt_attention_mask"].bool(), kept], dim=1), "wrong": tokens != END}
    losses = {}
    for name, mask in masks.items():
        labels = tokens.where(mask, -100)
        labels[:, :length] = -100
        batch = {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}
        losses[name] = distillation.divergence(student, teacher, batch, beta=BETA) / (labels != -100).sum()
    return losses
