"""Behind a soft prompt the padding of a prompt changes nothing, neither what is sampled nor how it is scored."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from trl_hotfix.testing import default_arguments, stub_trainer, trainer_and_config, wrapped_like_deepspeed

import tiny

ID = "grpo-prompt-learning-left-padding"
SCORERS = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
KEPT = 3
"""The number of columns of the completions."""

COLUMNS = torch.arange(7)
FIRST, END = torch.tensor([[2], [0], [3], [1]]), torch.tensor([[7], [6], [7], [5]])
MASK = ((COLUMNS >= FIRST) & (COLUMNS < END)).long()
"""Prompts of one to four tokens, and completions of one to three: the padding is on both sides."""

BATCHES = (2 + torch.arange(56).view(2, 4, 7) * torch.tensor([3, 5]).view(2, 1, 1)) % 11
SOFT = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=4),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
soft = pytest.mark.parametrize("kind", list(SOFT))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=1.0, **sizes, **heads, **ends))


def with_adapter(config: Any, base: Any = None) -> Any:
    base = llama() if base is None else base
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight)
    returns_log_probs(base)
    return model


def returns_log_probs(model: Any) -> None:
    """Have the model return log-probs too, as with TRL's own head."""
    forward = model.forward

    def forward_too(*args: Any, fused_lm_head: bool = False, labels: Any = None, **inputs: Any) -> Any:
        outputs = forward(*args, **inputs)
        if fused_lm_head:
            log_probs = outputs.logits[:, :-1].log_softmax(-1)
            outputs["log_probs"] = log_probs.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return outputs

    model.forward = forward_too


def log_probs_alone(model: Any, tokens: Any, row: int) -> Any:
    """Return the log-probs of the completion of this row without its padding."""
    ids = tokens[None, row, int(FIRST[row]) : int(END[row])]
    ones = torch.ones_like(ids)
    completion = int(END[row]) - 7 + KEPT
    logits = model(input_ids=ids, attention_mask=ones).logits[0, -completion - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, -completion:, None])[:, 0]


def right(model: Any, tokens: Any) -> Any:
    return torch.cat([log_probs_alone(model, tokens, row) for row in range(4)])


class Case:
    """A trainer of this method, and the method that scores."""

    def __init__(self, method: str, model: Any) -> None:
        try:
            module = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
        except ImportError:
            pytest.skip("this release has no such trainer")
        trainer_class, config_class = trainer_and_config(module, method)
        scorers = [name for name in SCORERS if name in vars(trainer_class)]
        if not scorers:
            pytest.skip("this release scores by another method")
        self.model = model
        settings = default_arguments(config_class, report_to=[], temperature=1.0)
        self.trainer = stub_trainer(trainer_class, settings, model=model, _is_vlm=False, use_liger_kernel=False)
        self.trainer.model_kwarg_keys = {"logits_to_keep"}
        self.trainer.accelerator.autocast = torch.enable_grad
        # TRL 0.27 labels the timing of the forward with the step.
        self.trainer.state = SimpleNamespace(global_step=0)
        (self.scorer,) = scorers
        self.target = f"{module.__name__}:{trainer_class.__name__}.{self.scorer}"

    def scored(self, tokens: Any = BATCHES[0], model: Any = None, mask: Any = MASK) -> Any:
        """Return the log-probs of the tokens of all completions, in one row."""
        outputs = getattr(self.trainer, self.scorer)(self.model if model is None else model, tokens, mask, KEPT)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs[mask[:, -KEPT:] == 1]

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


methods = pytest.mark.parametrize("method", ["GRPO", "RLOO"])


@methods
@soft
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_log_probs_and_gradients_are_those_of_each_row_alone(method: str, kind: str, training: bool) -> None:
    case = Case(method, with_adapter(SOFT[kind]))
    case.model.train(training)
    weights = [weight for weight in case.model.parameters() if weight.requires_grad]
    for number, tokens in enumerate(BATCHES, 1):
        found, expected = case.scored(tokens), right(case.model, tokens)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        weighted = torch.linspace(0.1, 1.0, len(found))
        gradients = torch.autograd.grad((found * weighted).sum(), weights)
        torch.testing.assert_close(
            gradients, torch.autograd.grad((expected * weighted).sum(), weights), atol=1e-4, rtol=1e-3
        )
        assert case.acts == number


@methods
@soft
def test_peft_counts_the_padding(method: str, kind: str, switch: Any) -> None:
    case = Case(method, with_adapter(SOFT[kind]))
    with switch.off():
        assert float((case.scored() - right(case.model, BATCHES[0])).detach().abs().max()) > 0.01


@methods
@soft
def test_rows_without_padding_have_the_log_probs_of_trl(method: str, kind: str, switch: Any) -> None:
    case = Case(method, with_adapter(SOFT[kind]))
    patched = case.scored(mask=torch.ones_like(MASK))
    with switch.off():
        assert patched.equal(case.scored(mask=torch.ones_like(MASK)))


@methods
def test_the_model_has_no_hook_afterwards_even_after_an_error(method: str) -> None:
    case = Case(method, with_adapter(SOFT["prompt tuning"]))
    base = case.model.get_base_model()
    hooks = len(base._forward_pre_hooks)
    case.scored()
    with pytest.raises(IndexError):
        case.scored(tokens=BATCHES[0] + 99)
    assert len(base._forward_pre_hooks) == hooks


@methods
def test_positions_that_the_model_is_given_stay(method: str) -> None:
    case = Case(method, with_adapter(SOFT["prompt tuning"]))
    given: list[Any] = []

    def give(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return args, {**inputs, "position_ids": torch.arange(10).expand(4, 10)}

    def note(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        given.append(inputs["position_ids"])

    base = case.model.get_base_model()
    base.register_forward_pre_hook(give, with_kwargs=True)
    base.model.register_forward_pre_hook(note, with_kwargs=True)
    case.scored()
    assert given[0].tolist() == [list(range(10))] * 4


@methods
def test_a_model_that_is_wrapped_for_training_is_called_through_its_wrapper(method: str) -> None:
    case = Case(method, with_adapter(SOFT["prompt tuning"]))
    wrapped = wrapped_like_deepspeed(case.model)
    case.trainer.model = wrapped
    case.trainer.accelerator.unwrap_model = lambda model, *args, **kwargs: getattr(model, "module", model)
    torch.testing.assert_close(case.scored(model=wrapped), right(case.model, BATCHES[0]), atol=2e-5, rtol=1e-4)


class WithoutPositions(LlamaForCausalLM):
    """A model that takes no positions."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)


def without_positions() -> Any:
    model = llama()
    model.__class__ = WithoutPositions
    return model


def with_a_text_config() -> Any:
    model = llama()
    text = copy.copy(model.config)
    model.config.get_text_config = lambda *args, **kwargs: text
    return model


UNTOUCHED = {
    "LoRA": lambda: with_adapter(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])),
    "no positions": lambda: with_adapter(SOFT["prompt tuning"], without_positions()),
    "for images": lambda: with_adapter(SOFT["prompt tuning"], with_a_text_config()),
}


@methods
@pytest.mark.parametrize("make", UNTOUCHED.values(), ids=list(UNTOUCHED))
def test_other_models_are_left_alone(method: str, make: Any, switch: Any) -> None:
    case = Case(method, make())
    patched = case.scored()
    assert case.acts == 0
    with switch.off():
        assert patched.equal(case.scored())


@methods
def test_a_model_without_adapter_is_left_alone(method: str) -> None:
    base = llama()
    returns_log_probs(base)
    case = Case(method, base)
    torch.testing.assert_close(case.scored(), right(base, BATCHES[0]), atol=2e-5, rtol=1e-4)
    assert case.acts == 0


@methods
def test_a_reference_without_the_soft_prompt_has_its_own_log_probs(method: str, switch: Any) -> None:
    case = Case(method, with_adapter(SOFT["prompt tuning"]))
    with case.model.disable_adapter():
        patched = case.scored()
    with switch.off(), case.model.disable_adapter():
        assert patched.equal(case.scored())


@methods
@soft
def test_what_is_generated_for_a_prompt_does_not_depend_on_its_padding(method: str, kind: str, switch: Any) -> None:
    import trl

    trainer_class = getattr(trl, f"{method}Trainer")
    if not any(name in vars(trainer_class) for name in SCORERS):
        pytest.skip("this release has no such methods")
    model = peft.get_peft_model(llama(), SOFT[kind])
    differences: list[float] = []
    prompts = ("w1 w2", "w3 w4 w5 w6 w7 w8", "w9", "w2 w4 w6 w8")
    config_class = getattr(trl, f"{method}Config")
    trainer = tiny.grpo(trainer_class, model, config_class, prompts=prompts, per_device_eval_batch_size=8)
    fixed_completions = model.generate

    options = {"min_new_tokens": 2, "max_new_tokens": 2, "top_k": 1, "pad_token_id": 0, "eos_token_id": 1}
    generation = GenerationConfig(output_logits=True, return_dict_in_generate=True, **options)

    def logits_of(ids: Any, mask: Any) -> Any:
        outputs = type(model).generate(model, input_ids=ids, attention_mask=mask, generation_config=generation)
        return torch.stack(outputs.logits, 1)

    def generate(input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        row = int(attention_mask.sum(1).argmin())
        begin = int(attention_mask[row].argmax())
        alone = logits_of(input_ids[None, row, begin:], attention_mask[None, row, begin:])
        together = logits_of(input_ids, attention_mask)[row]
        differences.append(float((alone[0] - together).abs().max()))
        return fixed_completions(input_ids)

    model.generate = generate
    trainer.evaluate(trainer.train_dataset)
    assert max(differences) < 1e-3
    differences.clear()
    with switch.off():
        trainer.evaluate(trainer.train_dataset)
    # From 0.21 on PEFT counts a prefix right where it generates.
    assert max(differences) > 0.01 or kind == "prefix tuning"
