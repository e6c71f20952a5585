"""Train soft prompts with the real RewardTrainer, save them, and load them on a model with another head.

How far does a step of SGD move the head? The gradient is that of the loss by its formula. What is loaded must score as
what was trained.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import every_trainer

ID = "reward-prompt-tuning-head-not-saved"
OVERLAYS = ()
PARITY = False
VARIANTS = "the bug is of soft prompts alone"

RATE = 0.5
CONFIGS = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")


def train() -> tiny.TrainingResult:
    if Version(version("trl")) >= Version("0.21") or Version(version("peft")) < Version("0.14"):
        return tiny.TrainingResult(absent("the PEFT of this place trains the head"))
    runs = {name: Run(name) for name in CONFIGS}
    outcomes = {name: run.judged() for name, run in runs.items()}
    first = outcomes[CONFIGS[0]]
    if {outcome.verdict for outcome in outcomes.values()} != {first.verdict}:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    for name, run in runs.items():
        assert run.acted in (None, 1), f"{name}: the wrapper acts {run.acted} times"
    return tiny.result_of_runs(runs, first)


def unaffected() -> tiny.TrainingResult:
    """Train LoRA, whose head PEFT trains, and a model without an adapter."""
    runs = {"lora": Run("LoraConfig"), "full": Run("")}
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts: {name}"
        assert run.judged().verdict is Verdict.FIXED, name
    return tiny.result_of_runs(runs, absent("the head is trained"))


@dataclass
class Run:
    """A step of a real trainer."""

    adapter: str

    def __post_init__(self) -> None:
        import torch

        trainer_class, config_class = tiny.classes("Reward")
        words = tiny.tokenizer()
        torch.manual_seed(0)
        self.trainer = tiny.trainer(
            tiny.stepwise(trainer_class),
            model=every_trainer._classifier("Reward"),
            args=tiny.config(config_class, optim="sgd", learning_rate=RATE),
            train_dataset=every_trainer._data("Reward", words),
            tokenizer=words,
            **({"peft_config": self.config()} if self.adapter else {}),
        )
        self.before = copy.deepcopy(self.trainer.model)
        self.trainer.train()
        self.steps, self.evaluations = self.trainer.steps, self.trainer.evaluations
        self.acted = tiny.acts(ID, f"{trainer_class.__module__}:{trainer_class.__name__}.__init__", self.trainer)

    def config(self) -> Any:
        import peft

        soft = {} if self.adapter == "LoraConfig" else {"num_virtual_tokens": 2}
        return getattr(peft, self.adapter)(task_type="SEQ_CLS", **soft)

    def judged(self) -> Outcome:
        """Judge how far the head has moved, and whether the saved adapter has it."""
        import torch

        head = head_of(self.before).requires_grad_()
        ((micro_batch,),) = (step.micro_batches for step in self.steps)
        loss = preference_loss(self.before, micro_batch.inputs)
        assert abs(float(loss.detach()) - micro_batch.loss) < 1e-6
        (gradient,) = torch.autograd.grad(loss, head)
        moved = head_of(self.trainer.model).detach() - head.detach()
        outcome = judge(float(moved.norm()), right=float(RATE * gradient.norm()), wrong=0.0)
        if outcome.verdict is Verdict.FIXED:
            torch.testing.assert_close(moved, -RATE * gradient)
        if self.adapter:
            difference = self.difference_when_loaded(micro_batch.inputs)
            assert (difference < 1e-6) is (outcome.verdict is Verdict.FIXED), difference
        return outcome

    def difference_when_loaded(self, inputs: Mapping[str, Any]) -> float:
        """Return how much the scores of the loaded adapter differ, on the model with another random head."""
        import torch
        from peft import PeftModel

        torch.manual_seed(0)
        base = every_trainer._classifier("Reward")
        head_of(base).data.mul_(-1)
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_model(folder)
            loaded = PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            scores = [scores_of(model.eval(), inputs) for model in (loaded, self.trainer.model)]
        return float((scores[0] - scores[1]).abs().max())


def head_of(model: Any) -> Any:
    """Return the weight of the head that is used: PEFT keeps the original one beside it."""
    heads = [weight for name, weight in model.named_parameters() if "score" in name and "original" not in name]
    return heads[0]


def scores_of(model: Any, inputs: Mapping[str, Any], side: str = "chosen") -> Any:
    return model(input_ids=inputs[f"input_ids_{side}"], attention_mask=inputs[f"attention_mask_{side}"]).logits


def preference_loss(model: Any, inputs: Mapping[str, Any]) -> Any:
    import torch

    difference = scores_of(model, inputs) - scores_of(model, inputs, "rejected")
    return -torch.nn.functional.logsigmoid(difference).mean()
