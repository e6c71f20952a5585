"""The reference is the adapter of the beginning; that of a new adapter, or of divided weights, is the base."""

from __future__ import annotations

import importlib
import inspect
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from trl_hotfix.authoring import shadowed
from trl_hotfix.patches.grpo.grpo_pretrained_adapter_reference_is_base import _COPY
from trl_hotfix.testing import (
    constructed,
    default_arguments,
    scored_completions,
    single_process,
    stub_that_scores,
    tiny_attention_model,
    tiny_tokenizer,
)

import tiny

ID = "grpo-pretrained-adapter-reference-is-base"
SCORING = ("_prepare_inputs", "_compute_loss", "compute_liger_loss", "_generate_and_score_completions")

COMPLETIONS = ((5, 3, 1), (10, 3, 1), (8, 9, 1), (3, 11, 1))
"""They are of one length, so that every release has the same mean."""
REWARDS = (0.5, 2.0, -1.0, 3.0)
BETA = 0.5
SETTINGS = {"temperature": 1.0, "loss_type": "bnpo", "use_bias_correction_kl": False, "num_generations": 4}

MODULES = {method: importlib.import_module(f"trl.trainer.{method.lower()}_trainer") for method in ("GRPO", "RLOO")}


def class_of(method: str) -> Any:
    return getattr(MODULES[method], f"{method}Trainer")


each_method = pytest.mark.parametrize(
    # RLOO before 0.22 is another trainer.
    "method",
    [name for name in MODULES if "reward_funcs" in inspect.signature(class_of(name).__init__).parameters],
)


def lora() -> Any:
    return LoraConfig(r=1, target_modules=["q_proj", "down_proj"], modules_to_save=["gate_proj"])


def trained(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if weight.requires_grad]


class Run:
    """A trainer of a model with a trained adapter, with a new one, or with both."""

    def __init__(self, method: str, adapter: str = "trained", *, beta: float = BETA, model: Any = None) -> None:
        self.method, self.module, self.beta = method, MODULES[method], beta
        self.model = tiny_attention_model() if model is None else model
        if adapter != "new" and model is None:
            self.model = get_peft_model(self.model, lora())
            self.move(1.0)
        self.trainer = self._made(lora() if adapter.endswith("new") else None)
        self.model = self.trainer.model
        self.beginning = self.log_probs().detach()

    def move(self, factor: float) -> None:
        """Train the adapter, in place."""
        for number, weight in enumerate(trained(self.model)):
            index = torch.arange(1.0, weight.numel() + 1).reshape(weight.shape)
            weight.data.add_((factor * torch.cos(factor * number + index) / 4).to(weight))

    def log_probs(self) -> Any:
        ids = torch.tensor([[3, 4, *completion] for completion in COMPLETIONS])
        log_probs = self.model(input_ids=ids).logits[:, 1:-1].log_softmax(-1)
        return log_probs.gather(2, ids[:, 2:, None])[..., 0]

    def of_base(self) -> Any:
        with torch.no_grad(), self.model.disable_adapter():
            return self.log_probs()

    def scored(self, training: bool = True) -> Any:
        """Score a generation of completions, and return what the loss is given."""
        settings = {"model": self.model, "training": training, **SETTINGS}
        scorer = stub_that_scores(self.module, COMPLETIONS, REWARDS, beta=self.beta, **settings)
        vars(self.trainer).update(vars(scorer), ref_model=None, current_gradient_accumulation_steps=1)
        return scored_completions(self.trainer)

    def has_reference(self, reference: Any, training: bool = True) -> bool:
        """Return whether the loss of GRPO, or the advantages of RLOO, and the gradients are those by the formula."""
        output = self.scored(training)
        log_probs = self.log_probs()
        if self.method == "GRPO":
            measured = self.trainer.compute_loss(self.model, output)
            kl = (reference - log_probs).exp() - (reference - log_probs) - 1
            gains = (log_probs - log_probs.detach()).exp() * output["advantages"][:, None]
            expected = (self.beta * kl - gains).mean()
        else:
            # As a number with a gradient.
            weights = torch.arange(1.0, 5.0) * log_probs.sum(1)
            rewards = torch.tensor(REWARDS) - self.beta * (log_probs.detach() - reference).sum(1)
            measured = (weights * output["advantages"]).sum()
            expected = (weights * (rewards - (rewards.sum() - rewards) / 3)).sum()
        gradients = [torch.autograd.grad(loss, trained(self.model), retain_graph=True) for loss in (measured, expected)]
        pairs = [(measured, expected), *zip(*gradients, strict=True)]
        return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)

    @property
    def acts(self) -> int:
        target = f"{self.module.__name__}:{self.method}Trainer"
        return sum(tiny.acts(ID, f"{target}.{name}", self.trainer) or 0 for name in SCORING)

    def _made(self, peft_config: Any) -> Any:
        one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
        one_device |= {"deepspeed_plugin": None, "bf16": False, "report_to": [], "world_size": 1, "process_index": 0}
        sizes = {"train_batch_size": 8, "eval_batch_size": 8, "steps_per_generation": 1, "generation_batch_size": 8}
        settings = {"gradient_checkpointing": False, "past_index": -1, "device": torch.device("cpu"), "beta": self.beta}
        with ExitStack() as stack:
            stack.enter_context(single_process(self.module))
            stack.enter_context(shadowed(self.module, "set_seed", lambda *args, **kwargs: None))
            return constructed(
                class_of(self.method),
                model=self.model,
                args=default_arguments(
                    getattr(self.module, f"{self.method}Config"), **one_device, **sizes, **settings, **SETTINGS
                ),
                reward_funcs=len,
                train_dataset=Dataset.from_dict({"prompt": ["a"]}),
                processing_class=tiny_tokenizer(),
                peft_config=peft_config,
            )


@each_method
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_reference_of_each_generation_is_the_adapter_of_the_beginning(method: str, training: bool) -> None:
    run = Run(method)
    for number in (1, 2):
        run.move(number + 1.0)
        assert run.has_reference(run.beginning, training)
        assert run.acts == number


@each_method
def test_trl_has_the_base_as_reference(method: str, switch: Any) -> None:
    with switch.off():
        run = Run(method)
        run.move(2.0)
        assert run.has_reference(run.of_base())
        assert not run.has_reference(run.beginning)


@each_method
def test_a_second_trainer_begins_with_what_the_first_has_trained(method: str) -> None:
    first = Run(method)
    first.move(2.0)
    second = Run(method, model=first.model)
    second.move(3.0)
    assert not first.beginning.allclose(second.beginning)
    for run in (first, second, first):
        assert run.has_reference(run.beginning)


@each_method
def test_the_model_has_its_own_weights_and_method_afterwards(method: str) -> None:
    run = Run(method)
    run.move(2.0)
    before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in run.model.named_parameters()}
    run.trainer.compute_loss(run.model, run.scored())
    for name, weight in run.model.named_parameters():
        place, numbers = before[name]
        assert weight.data_ptr() == place
        assert weight.equal(numbers)
    assert "disable_adapter" not in vars(run.model)


@each_method
def test_the_model_has_its_own_weights_after_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(method)
    run.move(2.0)
    before = [weight.data_ptr() for weight in trained(run.model)]

    def fail_for_the_reference(*args: Any, **kwargs: Any) -> Any:
        if [weight.data_ptr() for weight in trained(run.model)] != before:
            raise ArithmeticError
        log_probs = run.log_probs()
        return (log_probs, -log_probs) if "entropies" in name else log_probs

    names = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
    name = next(name for name in names if hasattr(run.trainer, name))
    vars(run.trainer)[name] = fail_for_the_reference
    with pytest.raises(ArithmeticError):
        run.trainer.compute_loss(run.model, run.scored())
    assert [weight.data_ptr() for weight in trained(run.model)] == before
    assert "disable_adapter" not in vars(run.model)


def test_the_reference_of_ligers_loss_is_the_adapter_of_the_beginning() -> None:
    of_liger = inspect.unwrap(getattr(class_of("GRPO"), "compute_liger_loss", class_of))
    if "disable_adapter" not in of_liger.__code__.co_names:
        pytest.skip("in this release Liger's loss is given the reference of the generation")
    run, given = Run("GRPO"), []
    run.move(2.0)

    def liger_grpo_loss(*, ref_per_token_logps: Any, **unused: Any) -> Any:
        given.append(ref_per_token_logps)
        return torch.zeros(()), [torch.zeros(1), torch.zeros(1)]

    output = run.scored()
    vars(run.trainer).update(liger_grpo_loss=liger_grpo_loss, _get_last_hidden_state=lambda *args, **kwargs: None)
    run.trainer.compute_liger_loss(SimpleNamespace(lm_head=torch.nn.Linear(1, 1)), output)
    assert torch.allclose(given[0], run.beginning, atol=1e-5)


@each_method
def test_a_model_that_is_cast_later_has_its_own_dtype_in_the_reference(method: str) -> None:
    run = Run(method)
    run.move(2.0)
    run.model.double()
    assert run.has_reference(run.beginning.double())
    assert {weight.dtype for weight in run.model.parameters()} == {torch.float64}


class Divided(torch.Tensor):
    pass


@each_method
@pytest.mark.parametrize(
    "divided",
    [
        lambda copy: {name: value[:0] for name, value in copy.items()},
        lambda copy: {name: value.as_subclass(Divided) for name, value in copy.items()},
        lambda copy: {**copy, "gone": torch.zeros(1)},
    ],
    ids=["other shapes", "another class", "one more"],
)
def test_weights_that_are_not_whole_leave_the_base_as_reference(method: str, divided: Any) -> None:
    run = Run(method)
    run.move(2.0)
    vars(run.trainer)[_COPY] = divided(vars(run.trainer)[_COPY])
    assert run.has_reference(run.of_base())
    assert run.acts == 0


@each_method
def test_the_reference_of_a_new_adapter_is_its_base(method: str) -> None:
    run = Run(method, "new")
    run.move(2.0)
    assert run.has_reference(run.of_base())
    assert run.acts == 0


@each_method
def test_what_is_trained_is_kept_and_nothing_else(method: str) -> None:
    run = Run(method)
    names = [name for name, weight in run.model.named_parameters() if weight.requires_grad]
    assert list(vars(run.trainer)[_COPY]) == names
    assert any("modules_to_save" in name for name in names)
    assert _COPY not in vars(Run(method, beta=0.0).trainer)


@each_method
def test_a_new_adapter_in_place_of_a_trained_one_has_its_base_as_reference(method: str) -> None:
    try:
        run = Run(method, "trained and new")
    except ValueError:
        pytest.skip("this release refuses to take both")
    assert _COPY not in vars(run.trainer)
    assert run.has_reference(run.of_base())
