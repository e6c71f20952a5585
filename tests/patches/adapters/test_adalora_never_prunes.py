"""PEFT's call comes once after each step of the optimizer; what remains of an adapter is as if it were in the loop."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from trl_hotfix.testing import base_for_adapters, stub_trainer

import tiny

ID = "adalora-never-prunes"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}.create_optimizer"

STEPS, LAST, TARGET_RANKS = 7, 5, 4
SCHEDULE = {"init_r": 4, "target_r": 2, "total_step": STEPS, "tinit": 1, "tfinal": STEPS - LAST}


def adapted(seed: int = 0, **settings: Any) -> Any:
    """Return a model with an AdaLoRA adapter of two matrices, whose singular values are not zero."""
    torch.manual_seed(seed)
    config = AdaLoraConfig(target_modules=["q_proj", "k_proj"], **{**SCHEDULE, **settings})
    model = get_peft_model(base_for_adapters(), config)
    for value in singular_values(model).values():
        torch.nn.init.normal_(value)
    return model


def singular_values(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.named_parameters() if "lora_E" in name}


def remaining(model: Any) -> int:
    return sum(int((value != 0).sum()) for value in singular_values(model).values())


class Run:
    """A trainer that is about to train this model, from this step on."""

    def __init__(self, model: Any, step: int = 0, *callbacks: Any, **state: Any) -> None:
        self.model, self.step = model, step
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        self.handler = CallbackHandler([DefaultFlowCallback, *callbacks], model, None, self.optimizer, None)
        kept = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "optimizer": self.optimizer}
        made = {**kept, "callback_handler": self.handler, **state}
        self.trainer = stub_trainer(CLASS, SimpleNamespace(), model=model, **made)
        assert self.trainer.create_optimizer() is self.optimizer
        self._event("on_train_begin")

    def _event(self, name: str) -> None:
        self.handler.call_event(name, self.trainer.args, SimpleNamespace(global_step=self.step), None)

    def train(self, steps: int, *, skipped: tuple[int, ...] = (), unreached: str = "nothing") -> Run:
        """Train these steps, each with gradients of its own."""
        for _ in range(steps):
            was_skipped = self.step + 1 in skipped
            set_gradients(self.model, self.step + 1, unreached, scale=float("nan") if was_skipped else 1.0)
            if not was_skipped:
                self.optimizer.step()
            self.optimizer.step_was_skipped = was_skipped
            self._event("on_optimizer_step")
            self.unreached = [name for name, value in self.model.named_parameters() if value.grad is None]
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


def set_gradients(model: Any, step: int, unreached: str = "nothing", scale: float = 1.0) -> None:
    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.requires_grad and unreached not in name:
            values = torch.arange(1.0, weight.numel() + 1) + 3 * number + 7 * step
            weight.grad = scale * torch.sin(values).reshape(weight.shape)


def in_the_loop(model: Any, steps: int, begin: int = 0, unreached: str = "nothing") -> Any:
    """Train as PEFT's documentation has it, with a gradient of zero where there is none."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    for step in range(begin + 1, begin + steps + 1):
        set_gradients(model, step, unreached)
        for weight in model.parameters():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    return model


def same(one: Any, other: Any) -> bool:
    return all(left.equal(right) for left, right in zip(one.parameters(), other.parameters(), strict=True))


def note(model: Any) -> Any:
    return model.peft_config["default"].rank_pattern


@pytest.mark.parametrize("steps", range(1, STEPS + 1))
def test_each_step_is_as_in_a_loop_with_the_call(steps: int) -> None:
    run, expected = Run(adapted()).train(steps), in_the_loop(adapted(), steps)
    assert same(run.model, expected)
    ours, theirs = (model.base_model.rankallocator.exp_avg_ipt for model in (run.model, expected))
    assert ours.keys() == theirs.keys()
    assert all(average.equal(theirs[name]) for name, average in ours.items())
    assert note(run.model) is None
    assert run.acts() == 1


def test_in_the_end_the_ranks_are_those_of_the_target(switch: Any) -> None:
    assert remaining(Run(adapted()).train(STEPS).model) == TARGET_RANKS
    with switch.off():
        assert remaining(Run(adapted()).train(STEPS).model) == 8


def test_ranks_move_only_at_the_steps_of_the_config() -> None:
    settings = {"deltaT": 3, "tinit": 2}
    run, counts = Run(adapted(**settings)), []
    for _ in range(STEPS):
        counts.append(remaining(run.train(1).model))
    assert counts[1] == 8 > counts[2]
    assert counts[4:] == [TARGET_RANKS] * 3
    assert same(run.model, in_the_loop(adapted(**settings), STEPS))


def test_all_rows_are_saved() -> None:
    run = Run(adapted()).train(STEPS)
    saved = get_peft_model_state_dict(run.model)
    assert {value.shape[0] for name, value in saved.items() if "lora_E" in name or "lora_A" in name} == {4}


@pytest.mark.parametrize("step", [LAST, LAST + 1])
def test_a_resumed_run_keeps_what_is_pruned(step: int) -> None:
    whole, stopped = (Run(adapted()).train(count).model for count in (STEPS, step))
    resumed = adapted(seed=1)
    resumed.load_state_dict(stopped.state_dict())
    assert same(Run(resumed, step).train(STEPS - step).model, whole)


def test_a_run_that_resumes_before_the_last_allocation_keeps_what_is_pruned() -> None:
    model = adapted()
    for value in singular_values(model).values():
        value.data[[0, 2]] = 0
    run = Run(model, LAST - 1).train(2)
    assert all((value[[0, 2]] == 0).all() and (value[[1, 3]] != 0).all() for value in singular_values(model).values())
    assert run.acts() == 1


@pytest.mark.parametrize("step", [LAST - 1, LAST, LAST + 1])
@pytest.mark.parametrize("pruned", [0, 1])
def test_a_run_that_resumes_with_too_many_ranks_is_pruned_in_its_first_step(step: int, pruned: int) -> None:
    model = adapted()
    next(iter(singular_values(model).values())).data[:pruned] = 0
    run = Run(model, step).train(1)
    assert remaining(model) == TARGET_RANKS
    kept = [(value != 0).tolist() for value in singular_values(model).values()]
    run.train(1)
    assert [(value != 0).tolist() for value in singular_values(model).values()] == kept


def test_the_values_of_a_new_adapter_are_zero_and_not_pruned() -> None:
    model = adapted()
    for value in singular_values(model).values():
        value.data.zero_()
    assert remaining(Run(model, LAST).train(1).model) == TARGET_RANKS


def test_a_resumed_run_allocates_with_the_average_of_its_own_steps() -> None:
    stopped = Run(adapted()).train(3).model
    model, other = adapted(seed=1), adapted(seed=2)
    for each in (model, other):
        each.load_state_dict(stopped.state_dict())
    assert same(Run(model, 3).train(2).model, in_the_loop(other, 2, 3))


def test_a_step_that_float16_skips_has_no_gradients() -> None:
    skipped = Run(adapted()).train(STEPS, skipped=(3,)).model
    assert same(skipped, in_the_loop(in_the_loop(adapted(), 2), 4, 3))


@pytest.mark.parametrize("steps", [LAST, STEPS])
def test_the_last_allocation_comes_even_if_float16_skips_that_step(steps: int) -> None:
    run = Run(adapted()).train(steps, skipped=(LAST,))
    assert remaining(run.model) == TARGET_RANKS
    kept = [value.isfinite().all() for value in run.model.parameters()]
    assert all(kept)


def test_an_optimizer_that_says_nothing_of_skipped_steps_skips_none() -> None:
    run = Run(adapted())
    set_gradients(run.model, 1)
    run._event("on_optimizer_step")
    assert run.model.base_model.rankallocator.exp_avg_ipt


def test_one_rank_that_a_checkpoint_has_left_is_kept() -> None:
    model = adapted()
    for value in singular_values(model).values():
        value.data.zero_()
    next(iter(singular_values(model).values())).data[1] = 1.0
    assert remaining(Run(model, LAST).train(1).model) == 1


def test_the_weights_of_the_adapter_alone_have_a_gradient_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(modules_to_save=["v_proj"])
    model.add_adapter("other", AdaLoraConfig(target_modules=["q_proj"], inference_mode=True, **SCHEDULE))
    model.set_adapter("default")
    run, reached = Run(model), set[str]()

    def note_gradients(step: int) -> None:
        reached.update(name for name, value in model.named_parameters() if value.grad is not None)

    monkeypatch.setattr(model.base_model, "update_and_allocate", note_gradients)
    run.train(1, unreached="v_proj")
    assert any("lora_E.default" in name for name in reached)
    assert [name for name in reached if "lora_" not in name or "other" in name] == []


def test_a_weight_without_a_gradient_has_one_of_zero_for_the_call() -> None:
    run = Run(adapted()).train(STEPS, unreached="k_proj.lora_B")
    assert same(run.model, in_the_loop(adapted(), STEPS, unreached="k_proj.lora_B"))
    assert any("k_proj.lora_B" in name for name in run.unreached)


def test_an_error_of_peft_leaves_config_and_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(adapted()).train(LAST)

    def fail(step: int) -> None:
        assert note(run.model)
        raise RuntimeError(step)

    monkeypatch.setattr(run.model.base_model, "update_and_allocate", fail)
    with pytest.raises(RuntimeError, match="6"):
        run.train(1, unreached="k_proj.lora_B")
    assert note(run.model) is None
    grads = {name for name, value in run.model.named_parameters() if value.requires_grad and value.grad is None}
    assert {"k_proj.lora_B" in name for name in grads} == {True}


class ByTheUser(TrainerCallback):
    """Makes the call from a step on, as those who know of it do."""

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 >= self.first:
            kwargs["model"].base_model.update_and_allocate(state.global_step + 1)


def test_a_callback_of_the_users_makes_the_only_calls() -> None:
    run = Run(adapted(), 0, ByTheUser()).train(STEPS)
    assert same(run.model, in_the_loop(adapted(), STEPS))
    assert note(run.model) is not None
    assert run.acts() == 0


def test_a_callback_that_begins_later_makes_the_rest() -> None:
    run = Run(adapted(), 0, ByTheUser(first=3)).train(STEPS)
    assert same(run.model, in_the_loop(adapted(), STEPS))


def test_a_config_with_a_note_is_left_alone() -> None:
    model = adapted()
    pattern = {"anything": [True]}
    model.peft_config["default"].rank_pattern = pattern
    run = Run(model).train(LAST)
    assert remaining(model) == 8
    assert note(model) is pattern
    assert run.acts() == 0


@pytest.mark.parametrize("rank", [4, 5])
def test_with_no_rank_to_take_nothing_is_called(rank: int) -> None:
    run = Run(adapted(target_r=rank)).train(STEPS)
    assert remaining(run.model) == 8
    assert run.acts() == 0


def test_the_optimizer_may_be_made_twice() -> None:
    run = Run(adapted())
    run.trainer.create_optimizer()
    assert same(run.train(STEPS).model, in_the_loop(adapted(), STEPS))
    assert len(run.handler.callbacks) == 2


@pytest.mark.parametrize("switch_of", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_weights_that_an_engine_keeps_are_left_alone(switch_of: str) -> None:
    assert len(Run(adapted(), **{switch_of: True}).handler.callbacks) == 1


def lora() -> Any:
    return get_peft_model(base_for_adapters(), LoraConfig(r=2, target_modules=["q_proj"]))


def inference() -> Any:
    model = get_peft_model(
        base_for_adapters(),
        AdaLoraConfig(target_modules=["q_proj"], inference_mode=True, **SCHEDULE),
    )
    next(iter(singular_values(model).values())).requires_grad_(True)
    return model


@pytest.mark.parametrize(
    "make",
    [lora, inference, base_for_adapters, lambda: torch.nn.Linear(1, 1)],
    ids=["LoRA", "inference", "none", "torch"],
)
def test_other_models_get_no_callback(make: Any) -> None:
    assert len(Run(make()).handler.callbacks) == 1


def test_two_trainers_have_their_own_ranks() -> None:
    first, second = Run(adapted()), Run(adapted(seed=3))
    for _ in range(STEPS):
        first.train(1)
        second.train(1)
    assert same(first.model, in_the_loop(adapted(), STEPS))
    assert same(second.model, in_the_loop(adapted(seed=3), STEPS))
