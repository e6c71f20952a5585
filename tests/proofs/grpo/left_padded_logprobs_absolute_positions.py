"""The proof: a GPT-Neo under the real GRPO and RLOO trainers, on prompts of several lengths, and with the Liger loss.

A run has two steps of two micro-batches, and an evaluation. Each log-prob is compared with that which the plain model
gives the row without its padding, and the accumulated gradients with those of a model that counts its positions itself.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the positions follow from the attention mask alone, and are the same again"}

NAMES = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
HIDDEN = "_get_last_hidden_state"
PROMPTS = ("w1 w2", "w3 w4 w5 w6 w7 w8", "w9", "w2 w4 w6 w8")


@dataclass
class Run:
    """What one run computed. ``sums`` are of all log-probs: TRL's, the right ones, those with the padding counted."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    off: float = 0.0
    """The largest difference of a log-prob from the right one."""
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)

    def record(self, measured: Any, model: Any, ids: Any, mask: Any, kept: int) -> None:
        """Compare the log-probs of a batch, or the hidden states before each token, with those of the plain model."""
        import torch

        def of_tokens(logits: Any, ids: Any) -> Any:
            return logits.log_softmax(-1).gather(2, ids[:, -kept:, None])[..., 0]

        def of_row(row: int, begin: int) -> Any:
            tokens, attention = ids[row : row + 1, begin:], mask[row : row + 1, begin:]
            return of_tokens(model(input_ids=tokens, attention_mask=attention).logits[:, -kept - 1 : -1], tokens)

        with torch.no_grad():
            if measured.dim() == 3:
                measured = of_tokens(model.get_output_embeddings()(measured), ids)
            right = torch.cat([of_row(row, int(mask[row].argmax())) for row in range(len(ids))])
            wrong = torch.cat([of_row(row, 0) for row in range(len(ids))])
            completions = mask[:, -kept:]
            self.off = max(self.off, float(((measured - right) * completions).abs().max()))
            for index, log_probs in enumerate((measured, right, wrong)):
                self.sums[index] += float((log_probs * completions).sum())


@contextmanager
def accepting_logits_to_keep(model: Any, trainer_class: type) -> Iterator[None]:
    """Let the model's ``forward`` take ``logits_to_keep``, which TRL passes to every model up to 0.19.

    GPT-2 takes it in later transformers, GPT-Neo in none.
    """
    model_class = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    original = model_class.forward

    def forward(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    if "logits_to_keep" in inspect.signature(original).parameters or NAMES[0] not in vars(trainer_class):
        yield
    else:
        with shadowed(model_class, "forward", forward):
            yield


def count_positions(model: Any) -> None:
    """Have the decoder of this model count positions by the attention mask, whoever calls it."""

    def counted(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = (kwargs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return args, {**kwargs, "position_ids": positions}

    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain.base_model.register_forward_pre_hook(counted, with_kwargs=True)


def trained(method: str, model: Any, prompts: tuple[str, ...], **settings: Any) -> Run:
    """Train two steps of two micro-batches, and evaluate."""
    import torch
    import trl

    trainer_class = getattr(trl, f"{method}Trainer")
    run = Run()

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            run.gradients |= {
                f"{method}.{len(run.losses)}.{name}": parameter.grad.clone()
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            }
            run.losses.append(float(loss))
            return loss

    def recording(name: str) -> Any:
        def scored(self: Any, model: Any, ids: Any, mask: Any, kept: int, *args: Any, **kwargs: Any) -> Any:
            outputs = getattr(super(Recorder, self), name)(model, ids, mask, kept, *args, **kwargs)
            plain = self.accelerator.unwrap_model(model)
            run.record(outputs[0] if isinstance(outputs, tuple) else outputs, plain, ids, mask, kept)
            return outputs

        return scored

    for name in (*NAMES, HIDDEN):
        if name in vars(trainer_class):
            setattr(Recorder, name, recording(name))
    usual = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 2}
    usual |= {"max_steps": 2, "num_iterations": 1, "beta": 0.04, "learning_rate": 1e-2}
    torch.manual_seed(0)
    config_class = getattr(trl, f"{method}Config")
    trainer = tiny.grpo(Recorder, model, config_class, prompts=prompts, **{**usual, **settings})
    with accepting_logits_to_keep(model, trainer_class):
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
    return run


class TokenLoss:
    """Stand for the Liger loss: the mean over tokens of -advantage * ratio + beta * KL, from hidden states."""

    def __init__(self, beta: float, **settings: Any) -> None:
        self.beta = beta

    def __call__(
        self,
        _input: Any,
        lin_weight: Any,
        selected_token_ids: Any,
        attention_mask: Any,
        advantages: Any,
        bias: Any = None,
        ref_per_token_logps: Any = None,
        **unused: Any,
    ) -> Any:
        logits = _input @ lin_weight.T
        log_probs = logits.log_softmax(-1).gather(2, selected_token_ids[..., None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        kl = (ref_per_token_logps - log_probs).exp() - (ref_per_token_logps - log_probs) - 1
        loss = -advantages[:, None] * ratio + self.beta * kl
        kl, loss = ((value * attention_mask).sum() / attention_mask.sum() for value in (kl, loss))
        return loss, (kl.detach(), kl.detach() * 0)


@contextmanager
def liger() -> Iterator[str]:
    """Give the name of the option for the Liger loss, if TRL then calls the decoder. Names alone are installed."""
    from trl.trainer import grpo_trainer

    source = inspect.getsource(grpo_trainer)
    if HIDDEN not in source and "_chunked_logps" not in source:
        yield ""
        return
    kernel: Any = types.ModuleType("liger_kernel.transformers")
    kernel._apply_liger_kernel_to_instance = lambda **settings: None
    modules = {kernel.__name__.partition(".")[0]: kernel, kernel.__name__: kernel}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for module in ("trl.trainer.grpo_trainer", "transformers.trainer", "transformers.integrations.liger"):
            if hasattr(sys.modules.get(module), "is_liger_kernel_available"):
                stack.enter_context(mock.patch(f"{module}.is_liger_kernel_available", return_value=True))
        for name in ("LigerFusedLinearGRPOLoss", "FusedLinearGRPOLoss"):
            stack.enter_context(mock.patch.object(grpo_trainer, name, TokenLoss, create=True))
        yield "use_liger_loss" if "self.use_liger_loss = args" in source else "use_liger_kernel"


def xglm(folder: str) -> Any:
    """Return an XGLM of two layers, the only one of these models that Liger's loss takes up to 1.5."""
    import torch
    from transformers import AutoModelForCausalLM, XGLMConfig, XGLMForCausalLM

    torch.manual_seed(0)
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    sizes = {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    XGLMForCausalLM(XGLMConfig(vocab_size=64, **none, **sizes, **ends)).save_pretrained(Path(folder, "xglm"))
    return AutoModelForCausalLM.from_pretrained(Path(folder, "xglm"))


def with_adapter(model: Any) -> Any:
    from peft import get_peft_model

    model = get_peft_model(model, tiny.lora())
    tiny.set_adapters(model)
    return model


def pairs_of_runs() -> Iterator[tuple[Run, Run]]:
    """Give each run of this release beside the same run of a model that counts its positions itself."""
    import trl

    def both(method: str, make: Any, **settings: Any) -> tuple[Run, Run]:
        with tempfile.TemporaryDirectory() as folder:
            model, counting = make(folder), make(folder)
            count_positions(counting)
            return trained(method, model, PROMPTS, **settings), trained(method, counting, PROMPTS, **settings)

    for method in ("GRPO", "RLOO"):
        if any(name in vars(getattr(trl, f"{method}Trainer", object)) for name in NAMES):
            yield both(method, lambda folder: tiny.gpt_neo(folder, seed=0))
    with liger() as option:
        if option:
            from trl.trainer import grpo_trainer

            source = inspect.getsource(grpo_trainer)
            make = xglm if "unwrapped_model.model(" in source else lambda folder: tiny.gpt_neo(folder, seed=0)
            adapter = "Liger loss is not supported with a PEFT model" not in source and not tiny.state.variant
            yield both("GRPO", (lambda folder: with_adapter(make(folder))) if adapter else make, **{option: True})


def train() -> tiny.TrainingResult:
    runs = list(pairs_of_runs())
    if not runs:
        return tiny.TrainingResult(absent("this release computes the log-probs elsewhere"))
    measured, right, wrong = (sum(run.sums[index] for run, _ in runs) for index in range(3))
    outcome = judge(measured, right=right, wrong=wrong, runs=len(runs))
    gradients: dict[str, Any] = {}
    for number, (run, counting) in enumerate(runs):
        gradients |= {f"{number}.{name}": gradient for name, gradient in run.gradients.items()}
        differ = max(float((run.gradients[name] - value).abs().max()) for name, value in counting.gradients.items())
        if outcome.verdict == "fixed" and (run.off > 1e-4 or differ > 1e-5):
            raise AssertionError(f"in run {number} log-probs are off by {run.off}, gradients by {differ}")
    return tiny.TrainingResult(outcome, runs[0][0].losses[0], gradients)


def unaffected() -> tiny.TrainingResult:
    """Train on prompts of one length, without padding, and a Llama, whose positions are rotary, on padded ones."""
    gradients: dict[str, Any] = {}
    loss = 0.0
    with liger() as option:
        unpadded = ("w1 w2 w3", "w4 w5 w6", "w7 w8 w9", "w2 w4 w6")
        runs: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [("gpt_neo", unpadded, {}), ("llama", PROMPTS, {})]
        runs += [("llama", PROMPTS, {option: True})] * bool(option)
        for number, (kind, prompts, settings) in enumerate(runs):
            with tempfile.TemporaryDirectory() as folder:
                run = trained("GRPO", getattr(tiny, kind)(folder, seed=0), prompts, **settings)
            loss += sum(run.losses)
            gradients |= {f"{number}.{name}": value for name, value in run.gradients.items()}
    return tiny.TrainingResult(absent("no padding, or no table of positions"), loss, gradients)
