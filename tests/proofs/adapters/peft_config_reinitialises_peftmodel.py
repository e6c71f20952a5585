"""Train two steps of two micro-batches with the real GRPO and SFT trainers, a new adapter on a model that has one.

GRPO has the KL in its loss, and SFT rows of several lengths. The gradients of each step are compared with those of the
formulas (arXiv:2402.03300, equations 3 and 4, and the mean over tokens) for two models with the new adapter. One has
the weights W + B A alpha / r, the other W. With the patch an adapter that cannot be merged ends the run.
"""

from __future__ import annotations

import statistics
import tempfile
from importlib.metadata import version
from typing import Any

from packaging.version import Version

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = "it is about the model that the trainer is made with, before it is compiled; the proof trains LoRA itself"
EQUIVALENT = {"applied twice": "the second finds the merged base, which is no PeftModel"}

ID = "peft-config-reinitialises-peftmodel"
TARGETS = {
    "GRPO": "trl.trainer.grpo_trainer:GRPOTrainer.__init__",
    "SFT": "trl.trainer.sft_trainer:SFTTrainer._prepare_peft_model",
}
STEPS, MICRO_BATCHES, BETA = 2, 2, 1.0


def train() -> tiny.TrainingResult:
    if not _trainers() or Version(version("trl")) >= Version("0.27"):
        return tiny.TrainingResult(absent("this release has no GRPO, or refuses a peft_config with a PeftModel"))
    runs = {f"{name} {old}": _Run(name, old) for name in _trainers() for old in ("default", "policy")}
    outcomes = {name: run.outcome() for name, run in runs.items()}
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    _refuse_what_cannot_be_merged()
    gradients = {f"{name} {key}": value for name, run in runs.items() for key, value in run.first_gradients.items()}
    return tiny.TrainingResult(outcomes["GRPO default"], runs["GRPO default"].first_loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train an adapter further, and a new one on a model without an adapter."""
    kinds: dict[str, tuple[str | None, bool]] = {"old": ("default", False), "new": (None, True)}
    runs = {f"{name} {kind}": _Run(name, *kinds[kind]) for name in _trainers() for kind in kinds}
    if any(run.acts for run in runs.values()):
        raise AssertionError(f"the patch acts: {[(name, run.acts) for name, run in runs.items()]}")
    return tiny.result_of_runs(runs, absent("there is one adapter"))


def _trainers() -> list[str]:
    """Return the trainers that put an adapter on every model. Up to 0.19 SFT leaves a PeftModel as it is."""
    release = Version(version("trl"))
    trainers = {"GRPO": Version("0.14") <= release, "SFT": Version("0.20") <= release}
    return [name for name, takes_both in trainers.items() if takes_both]


class _Run:
    """A run of a real trainer: a model with the adapter ``old``, if it has a name, and a new one, unless it is not."""

    def __init__(self, name: str, old: str | None, new: bool = True) -> None:
        import torch
        from peft import get_peft_model

        self.name, self.old = name, old
        self.evaluations: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            model, self.right, self.wrong = (tiny.llama(folder, seed=0) for _ in range(3))
            if old is not None:
                model = get_peft_model(model, tiny.lora(), adapter_name=old)
                tiny.set_adapters(model)
                _merge_by_hand(self.right, model, old)
            torch.manual_seed(0)
            make = {"GRPO": _grpo, "SFT": _sft}[name]
            trainer = make(model, _new_lora() if new else None)
            if new:
                _set_trainable(trainer.model)
            trainer.train()
        self.prompt = trainer.processing_class("w1 w2 w3")["input_ids"]
        self.steps = trainer.steps
        if [len(step.micro_batches) for step in self.steps] != [MICRO_BATCHES] * STEPS:
            raise AssertionError(f"{name}: expected {STEPS} steps of {MICRO_BATCHES} micro-batches")
        self.acts = tiny.acts(ID, TARGETS[name], trainer)
        self.first_gradients: dict[str, Any] = {}
        self.first_loss = 0.0

    def outcome(self) -> Outcome:
        """Judge how many steps have the gradients of the formula, on the trained model. With the bug it is the base."""
        from peft import get_peft_model

        right, wrong = (get_peft_model(model, _new_lora()) for model in (self.right, self.wrong))
        are_right = [self._is_of(right, number) for number in range(STEPS)]
        are_wrong = [self._is_of(wrong, number) for number in range(STEPS)]
        if any(is_right == is_wrong for is_right, is_wrong in zip(are_right, are_wrong, strict=True)):
            raise AssertionError(f"{self.name} {self.old}: right {are_right}, wrong {are_wrong}")
        outcome = judge(float(sum(are_right)), right=float(STEPS), wrong=0.0)
        if all(are_right) and self.acts not in (None, 1):
            raise AssertionError(f"{self.name} {self.old}: the patch acts {self.acts} times")
        return outcome

    def _is_of(self, model: Any, number: int) -> bool:
        """Return whether the gradients of a step are those of ``model`` with the new adapter of the trainer."""
        step = self.steps[number]
        adapter = {name: weight for name, weight in _renamed(step.weights).items() if ".lora_" in name}
        model.load_state_dict(adapter, strict=False)
        model.zero_grad()
        loss = (self._grpo_loss if self.name == "GRPO" else self._sft_loss)(model, step)
        loss.backward()
        gradients, expected = _renamed(step.gradients), tiny.gradients_of(model)
        assert gradients.keys() == expected.keys(), (self.name, self.old, sorted(gradients))
        # Some transformers leave out the division by the micro-batches.
        for factor in (1.0, float(MICRO_BATCHES)):
            divided = {name: gradient / factor for name, gradient in gradients.items()}
            if max(float((divided[name] - value).abs().max()) for name, value in expected.items()) < 1e-6:
                if number == 0:
                    self.first_gradients, self.first_loss = divided, _nearest(step, float(loss.detach()))
                return True
        return False

    def _grpo_loss(self, model: Any, step: tiny.Step) -> Any:
        """Return the loss of the one group, a row at a time. Its completions are equally long."""
        import torch

        unit = (1 - 1e-4) / statistics.stdev(range(4))
        losses = []
        for row in range(4):
            completion = [*(10 + (7 * row + 3 * place) % 50 for place in range(7)), 1]
            ids = torch.tensor([self.prompt + completion])
            log_probs = _log_probs(model, ids)[len(self.prompt) - 1 :]
            with torch.no_grad(), model.disable_adapter():
                of_reference = _log_probs(model, ids)[len(self.prompt) - 1 :]
            kl = (of_reference - log_probs).exp() - (of_reference - log_probs) - 1
            gain = (log_probs - log_probs.detach()).exp() * (row - 1.5) * unit
            losses.append((BETA * kl - gain).mean())
        return torch.stack(losses).mean()

    def _sft_loss(self, model: Any, step: tiny.Step) -> Any:
        """Return the sum over the tokens of the step, divided by the number of labels that transformers has counted."""
        losses = [_token_losses(model, call.inputs).sum() for call in step.micro_batches]
        return sum(losses) / step.micro_batches[0].keywords["num_items_in_batch"]


def _nearest(step: tiny.Step, expected: float) -> float:
    """Return the loss of a step. GRPO of 0.22 divides it by the micro-batches itself.

    Releases shuffle the completions of a step in other ways, so that each micro-batch has others of them.
    """
    loss = statistics.mean(micro_batch.loss for micro_batch in step.micro_batches)
    return min((loss, loss * MICRO_BATCHES), key=lambda value: abs(value - expected))


def _log_probs(model: Any, ids: Any) -> Any:
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def _token_losses(model: Any, batch: dict[str, Any]) -> Any:
    """Return the losses of all tokens of a batch, a row at a time and so without padding."""
    import torch

    lengths = batch["attention_mask"].sum(1).tolist()
    return torch.cat(
        [-_log_probs(model, row[None, :length]) for row, length in zip(batch["input_ids"], lengths, strict=True)]
    )


_TRAINING = {
    "gradient_accumulation_steps": MICRO_BATCHES,
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": 0.1,
}


def _grpo(model: Any, peft_config: Any) -> Any:
    from trl import GRPOTrainer

    trainer = tiny.grpo_of_one_length(tiny.stepwise(GRPOTrainer), model, peft_config, beta=BETA, **_TRAINING)
    # The completions are those of the model that the trainer was given.
    trainer.model.generate = vars(model)["generate"]
    return trainer


def _sft(model: Any, peft_config: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{3 * row + word}" for word in range(2 + row)) for row in range(8)]
    return tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, max_length=16, **_TRAINING),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        tokenizer=tiny.tokenizer(),
        peft_config=peft_config,
    )


def _new_lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def _set_trainable(model: Any) -> None:
    """Set what is trained to fixed values other than 0: PEFT draws half of it, and the other half begins at 0."""
    import torch

    for number, weight in enumerate(weight for weight in model.parameters() if weight.requires_grad):
        weight.data = 0.9 * torch.cos(2 * number + torch.arange(weight.numel())).reshape(weight.shape)


def _merge_by_hand(base: Any, model: Any, adapter: str) -> None:
    """Add B A alpha / r to the weights of ``base``."""
    weights, config = model.state_dict(), model.peft_config[adapter]
    for name, module in base.named_modules():
        prefix = f"base_model.model.{name}"
        if f"{prefix}.lora_A.{adapter}.weight" in weights:
            product = weights[f"{prefix}.lora_B.{adapter}.weight"] @ weights[f"{prefix}.lora_A.{adapter}.weight"]
            module.weight.data += product * config.lora_alpha / config.r


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values by the names that they have in a PeftModel, and not in one within another."""
    return {name.replace("base_model.model." * 2, "base_model.model."): value for name, value in values.items()}


def _refuse_what_cannot_be_merged() -> None:
    """Make a trainer on a model with prompt tuning. The error must end the run, and leave the patch on."""
    from peft import PromptTuningConfig, get_peft_model

    def is_on() -> bool:
        return bool(trl_hotfix.status()[ID].state.value == "applied")

    if not is_on():
        return
    with tempfile.TemporaryDirectory() as folder:
        prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        for make in (_grpo, *([_sft] if "SFT" in _trainers() else [])):
            try:
                make(get_peft_model(tiny.llama(folder, seed=0), prompt), _new_lora())
            except ValueError as error:
                if ID not in str(error):
                    raise
            else:
                raise AssertionError("an adapter that cannot be merged is not refused")
    if not is_on():
        raise AssertionError("the patch is off after the error")
