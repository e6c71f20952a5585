"""The proof: GRPO and RLOO with each kind of soft prompt on prompts of several lengths, two steps and an evaluation.

Each log-prob is compared with that of the row alone, without padding, and so is what the model generates for a prompt.
The gradients are compared with those of a model that counts its positions itself.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

ID = "grpo-prompt-learning-left-padding"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"
OVERLAYS = ()
PARITY = False
VARIANTS = "it is for one kind of adapter, and has it in every run"
EQUIVALENT = {"applied twice": "positions that are given are left alone"}

SCORERS = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
PROMPTS = ("w1 w2", "w3 w4 w5 w6 w7 w8", "w9", "w2 w4 w6 w8")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
}
SETTINGS |= {"max_steps": 2, "num_iterations": 1, "beta": 0.04, "learning_rate": 1e-2, "gradient_checkpointing": False}


@dataclass
class Run:
    """What one run computed. ``sums``: of the squares of what the padding changes, and of how much of that TRL has."""

    trainer: Any = None
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    off: float = 0.0
    """The largest difference of a log-prob, scored or generated, from the right one."""
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)

    def scored(self, measured: Any, model: Any, ids: Any, mask: Any, kept: int) -> None:
        import torch

        def of_row(row: int, begin: int) -> Any:
            tokens, attention = ids[row : row + 1, begin:], mask[row : row + 1, begin:]
            logits = model(input_ids=tokens, attention_mask=attention).logits[:, -kept - 1 : -1]
            return logits.log_softmax(-1).gather(2, tokens[:, -kept:, None])[0, :, 0]

        with torch.no_grad():
            right = torch.stack([of_row(row, int(mask[row].argmax())) for row in range(len(ids))])
            with beneath(model).register_forward_pre_hook(counting_all, with_kwargs=True):
                wrong = torch.stack([of_row(row, 0) for row in range(len(ids))])
        off, changed = ((log_probs - right) * mask[:, -kept:] for log_probs in (measured.detach(), wrong))
        self.off = max(self.off, float(off.abs().max()))
        self.sums[0] += float(changed.square().sum())
        self.sums[1] += float((off * changed).sum())

    def generated(self, model: Any, ids: Any, mask: Any) -> None:
        """Generate two tokens for all prompts, and for the first and the last alone."""
        import torch
        from transformers import GenerationConfig

        options = {"min_new_tokens": 2, "max_new_tokens": 2, "top_k": 1, "pad_token_id": 0, "eos_token_id": 1}
        config = GenerationConfig(output_logits=True, return_dict_in_generate=True, **options)

        def logits_of(ids: Any, mask: Any) -> Any:
            outputs = type(model).generate(model, input_ids=ids, attention_mask=mask, generation_config=config)
            return torch.stack(outputs.logits, 1)

        logits = logits_of(ids, mask)
        for row in (0, -1):
            begin = int(mask[row].argmax())
            alone = logits_of(ids[row, None, begin:], mask[row, None, begin:])
            self.off = max(self.off, float((logits[row] - alone[0]).abs().max()))


def beneath(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def counting_all(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """Count the padding, as a model does that is given no positions."""
    import torch

    given = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    positions = torch.arange(inputs["attention_mask"].shape[1])[None, -given.shape[1] :]
    return args, {**inputs, "position_ids": positions}


def counting_tokens(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
    if "attention_mask" not in inputs:  # PEFT asks some models for their cache so.
        return None
    given = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    positions = (inputs["attention_mask"].long().cumsum(1) - 1)[:, -given.shape[1] :]
    return args, {**inputs, "position_ids": positions}


def model_with(kind: str, folder: str) -> Any:
    """Return a Llama with three virtual tokens. Those of ``Prefix`` are keys and values, and ``Lora`` has none."""
    import peft
    import torch

    model = tiny.llama(folder, seed=0)
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() == 2 else 1
    if kind == "Lora":
        return peft.get_peft_model(model, tiny.lora())
    sizes = {"encoder_hidden_size": 8} if kind == "PromptEncoder" else {}
    config_class = getattr(peft, "PrefixTuningConfig" if kind == "Prefix" else f"{kind}Config")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config_class(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes))


def trained(method: str, model: Any, prompts: tuple[str, ...] = PROMPTS) -> Run:
    import torch
    import trl

    trainer_class = getattr(trl, f"{method}Trainer")
    run = Run()

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            run.gradients |= {
                f"{len(run.losses)}.{name}": parameter.grad.clone()
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            }
            run.losses.append(float(loss))
            return loss

    def recording(name: str) -> Any:
        def scored(self: Any, model: Any, ids: Any, mask: Any, kept: int, *args: Any, **kwargs: Any) -> Any:
            outputs = getattr(super(Recorder, self), name)(model, ids, mask, kept, *args, **kwargs)
            log_probs = outputs[0] if isinstance(outputs, tuple) else outputs
            run.scored(log_probs, self.accelerator.unwrap_model(model), ids, mask, kept)
            return outputs

        return scored

    for name in SCORERS:
        if name in vars(trainer_class):
            setattr(Recorder, name, recording(name))
    torch.manual_seed(0)
    run.trainer = tiny.grpo(Recorder, model, getattr(trl, f"{method}Config"), prompts=prompts, **SETTINGS)
    fixed_completions = model.generate

    def generate(input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        run.generated(model, input_ids, attention_mask)
        return fixed_completions(input_ids)

    model.generate = generate
    run.trainer.train()
    run.trainer.evaluate(run.trainer.train_dataset)
    return run


def methods() -> list[str]:
    import trl

    classes = {method: getattr(trl, f"{method}Trainer", object) for method in ("GRPO", "RLOO")}
    return [method for method in classes if any(name in vars(classes[method]) for name in SCORERS)]


def train() -> tiny.TrainingResult:
    if not methods():
        return tiny.TrainingResult(absent("this release computes the log-probs elsewhere"))
    runs = {}
    for method, kind in [
        ("GRPO", "PromptTuning"),
        ("GRPO", "Prefix"),
        *((other, "PromptEncoder") for other in methods()),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            run = trained(method, model_with(kind, folder))
            counting = model_with(kind, folder)
            counting.get_base_model().register_forward_pre_hook(counting_tokens, with_kwargs=True)
            runs[f"{method}.{kind}"] = run, trained(method, counting)
    changed, off = (sum(run.sums[index] for run, _ in runs.values()) for index in range(2))
    # 1 if each log-prob is the one with the padding counted, and 0 if it is the right one.
    outcome = judge(round(off / changed, 3), right=0.0, wrong=1.0)
    gradients: dict[str, Any] = {}
    for name, (run, counting) in runs.items():
        gradients |= {f"{name}.{key}": gradient for key, gradient in run.gradients.items()}
        differ = max(float((run.gradients[key] - value).abs().max()) for key, value in counting.gradients.items())
        if outcome.verdict == "fixed" and (run.off > 1e-4 or differ > 1e-5):
            raise AssertionError(f"{name}: log-probs are off by {run.off}, gradients by {differ}")
    return tiny.TrainingResult(outcome, next(iter(runs.values()))[0].losses[0], gradients)


def unaffected() -> tiny.TrainingResult:
    """Train LoRA and a whole model on padded prompts, and a soft prompt on prompts of one length."""
    one_length = ("w1 w2 w3", "w4 w5 w6", "w7 w8 w9", "w2 w4 w6")
    gradients: dict[str, Any] = {}
    loss = 0.0
    for number, (kind, prompts) in enumerate((("Lora", PROMPTS), ("", PROMPTS), ("PromptTuning", one_length))):
        with tempfile.TemporaryDirectory() as folder:
            run = trained("GRPO", model_with(kind, folder) if kind else tiny.llama(folder, seed=0), prompts)
        assert kind == "PromptTuning" or not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {kind or 'whole'}"
        loss += sum(run.losses)
        gradients |= {f"{number}.{name}": value for name, value in run.gradients.items()}
    return tiny.TrainingResult(absent("no soft prompt, or no padding"), loss, gradients)
