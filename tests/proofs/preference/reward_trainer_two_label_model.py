"""Train two steps of two micro-batches, and evaluate, with RewardTrainer on a model that is given by its name.

Losses and gradients are compared with the formula of Bradley and Terry: for the first output alone, and for the mean
over two outputs. The weights of the outputs, which transformers draws at random, are set when the trainer is made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny.backward import measure_factors

ID, TARGET = "reward-trainer-two-label-model", "trl.trainer.reward_trainer:RewardTrainer.__init__"
OVERLAYS = ()
PARITY = True
VARIANTS = "the model is loaded before it is compiled, and whatever part of it is trained"


def reward(model: Any, *, options: Any = None, **settings: Any) -> Any:
    """Return a trainer that has trained two steps and evaluated."""
    import torch
    from trl import RewardConfig, RewardTrainer

    from tiny.data import preferences_of_several_lengths

    data = preferences_of_several_lengths()
    trainer = tiny.trainer(
        tiny.stepwise(RewardTrainer),
        model=model,
        args=tiny.config(
            RewardConfig,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            max_length=32,
            model_init_kwargs=options,
            **settings,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        tokenizer=tiny.tokenizer(),
    )
    score = trainer.model.score.weight
    score.data = 0.3 * torch.cos(torch.arange(score.numel())).reshape(score.shape)
    factors = measure_factors(trainer)
    trainer.train()
    trainer.evaluate()
    (factor,) = factors
    for step in trainer.steps:
        step.gradients = {name: gradient / factor for name, gradient in step.gradients.items()}
    return trainer


def scores(weights: dict[str, Any], inputs: dict[str, Any], config: Any) -> Any:
    """Return the outputs at the last token of each row, (rows, outputs), by the weights of a Llama and of its score."""
    import torch
    from transformers import LlamaModel

    model = LlamaModel(config)
    inner = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    outputs = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        hidden = torch.func.functional_call(model, inner, kwargs={"input_ids": ids[mask][None], "use_cache": False})
        outputs.append(hidden.last_hidden_state[0, -1] @ weights["score.weight"].T)
    return torch.stack(outputs)


def bradley_terry(rewards: Any) -> Any:
    """Return the loss of a batch whose first half was chosen: (rows, outputs)."""
    import torch

    chosen, rejected = rewards.chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


KINDS = {"right": lambda outputs: bradley_terry(outputs[:, :1]), "wrong": bradley_terry}


def judged(trainer: Any) -> Any:
    """Judge the losses and gradients of both steps and of the evaluation. They are of one kind."""
    import torch

    outcomes, config = [], trainer.model.config
    for step in trainer.steps:
        assert len(step.micro_batches) == 2
        weights = {name: value.clone().requires_grad_() for name, value in step.weights.items()}
        parts = {name: [] for name in KINDS}
        for micro_batch in step.micro_batches:
            outputs = scores(weights, micro_batch.inputs, config)
            losses = {name: formula(outputs) for name, formula in KINDS.items()}
            outcomes.append(judge(micro_batch.loss, **{name: float(loss.detach()) for name, loss in losses.items()}))
            for name, loss in losses.items():
                parts[name].append(loss)
        kind = "right" if outcomes[-1].verdict is Verdict.FIXED else "wrong"
        names = list(step.gradients)
        gradients = torch.autograd.grad(sum(parts[kind]), [weights[name] for name in names])
        assert (difference := step.difference(dict(zip(names, gradients, strict=True)))) < 1e-5, difference
    after = trainer.model.state_dict()
    for evaluation in trainer.evaluations:
        outputs = scores(after, evaluation.inputs, config)
        outcomes.append(judge(evaluation.loss, **{name: float(formula(outputs)) for name, formula in KINDS.items()}))
    if len(trainer.steps) != 2 or not trainer.evaluations or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected two steps and an evaluation of one kind: {outcomes}")
    return outcomes[0]


def train() -> tiny.TrainingResult:
    import trl.trainer.reward_trainer as module

    if not hasattr(module, "AutoModelForSequenceClassification"):
        return tiny.TrainingResult(absent("in this release the trainer loads no model"))
    with tempfile.TemporaryDirectory() as folder:
        tiny.llama(folder, seed=0)
        trainer = reward(f"{folder}/llama-0")
        outcome = judged(trainer)
        outputs = len(trainer.model.score.weight)
        assert trainer.model.config.num_labels == outputs == (1 if outcome.verdict is Verdict.FIXED else 2)
        # What is saved has as many outputs when it is loaded as a reward.
        trainer.save_model(f"{folder}/saved")
        assert len(reward(f"{folder}/saved").model.score.weight) == outputs
    # The second step is another one where the gradient of the first is halved.
    first = trainer.steps[0]
    return tiny.TrainingResult(outcome, sum(part.loss for part in first.micro_batches), first.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a model that is passed, one with a number of outputs of the user's, and one with a config of the user's."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as folder:
        tiny.llama(folder, seed=0)
        path = str(Path(folder, "llama-0"))
        torch.manual_seed(0)
        passed = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        runs = {
            "passed": reward(passed),
            "two": reward(path, options={"num_labels": 2}),
            "one": reward(path, options={"num_labels": 1}),
            "a config": reward(path, options={"config": AutoConfig.from_pretrained(path)}),
        }
    for name, trainer in runs.items():
        if tiny.acts(ID, TARGET, trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("the model is passed, or the user says how many outputs it has"))
