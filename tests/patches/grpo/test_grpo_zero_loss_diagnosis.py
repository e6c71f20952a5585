"""One log line names the case of a run as soon as it is proven. A healthy run gets none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.grpo.grpo_zero_loss_diagnosis import say_what_became_of_the_adapter
from trl_hotfix.testing import stub_grpo_trainer

Entry = Mapping[str, Any]
"""What a step logs: numbers, and as lists the metrics of each generation."""

LEARNING: Entry = {"loss": 0.1, "grad_norm": 0.5, "reward_std": [0.3], "frac_reward_zero_std": [0.0]}
ZERO: Entry = {**LEARNING, "loss": 0.0}
NO_GRADIENT: Entry = {**ZERO, "grad_norm": 0.0}
NO_SIGNAL: Entry = {**NO_GRADIENT, "reward_std": [0.0], "frac_reward_zero_std": [1.0]}
SHOWN_AS_ZERO = 5e-5

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}
NOT_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
NOTHING = SimpleNamespace(param_groups=[{"params": []}])
"""An optimizer without parameters."""


def without_share(**changed: Any) -> Entry:
    """Return an entry without gradient and signal, as it is logged before 0.18."""
    return {**{name: value for name, value in NO_SIGNAL.items() if name != "frac_reward_zero_std"}, **changed}


class Metrics(dict[str, list[float]]):
    """Metrics that are also those of each mode, for releases that keep them by mode and for those that do not."""

    def __missing__(self, mode: str) -> Metrics:
        return self


def with_embedding(model: Any) -> Any:
    model.embedding = torch.nn.Embedding(1, 1)
    model.get_input_embeddings = lambda: model.embedding
    return model


def plain() -> Any:
    return with_embedding(torch.nn.Module())


def frozen() -> Any:
    return plain().requires_grad_(False)


def frozen_with_hook() -> Any:
    """Return a frozen model the outputs of whose embedding may need gradients, because of a hook."""
    model = frozen()
    model.embedding.register_forward_hook(lambda module, args, output: None)
    return model


def without_embedding() -> Any:
    return torch.nn.Linear(1, 1)


def with_adapter(*modules: str) -> Any:
    """Return a model with a trained LoRA on these modules, or on all. Half of each matrix B is 0."""
    peft = pytest.importorskip("peft")
    base = plain()
    base.q, base.lm_head = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    base.get_output_embeddings = lambda: base.lm_head
    model = peft.get_peft_model(base, peft.LoraConfig(r=1, target_modules=list(modules or ("q", "lm_head"))))
    for name, tensor in model.named_parameters():
        if ".lora_B." in name:
            tensor.data[0] = 1.0
    return model


def stub(model: Any = None, *, main: bool = True, **settings: Any) -> Any:
    optimizer = SimpleNamespace(param_groups=[{"params": [1]}, {"params": []}])
    usual = {"beta": 0.0, "optimizer": optimizer, "fp16": False, "gradient_checkpointing": False}
    trainer = stub_grpo_trainer(grpo_trainer, **{**usual, **settings})
    trainer.accelerator.is_main_process = main
    vars(trainer).update(
        model=plain() if model is None else model,
        use_liger_loss=settings.get("use_liger_loss", False),
        state=SimpleNamespace(epoch=None, log_history=[], global_step=1, num_input_tokens_seen=0),
        callback_handler=SimpleNamespace(on_log=lambda args, state, control, logs: control),
    )
    return trainer


def log(trainer: Any, values: Entry) -> None:
    metrics = {name: value for name, value in values.items() if isinstance(value, list)}
    trainer._metrics = Metrics(metrics)
    trainer.log({name: value for name, value in values.items() if name not in metrics})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the new log lines since it was last called, with their levels."""
    caplog.set_level(logging.INFO, "trl_hotfix")

    def new() -> list[str]:
        said = [record for record in caplog.records if record.getMessage().startswith("GRPO: ")]
        caplog.clear()
        return [f"{record.levelname}: {record.getMessage().removeprefix('GRPO: ')}" for record in said]

    return new


@pytest.fixture
def said(lines: Callable[[], list[str]]) -> Callable[..., dict[int, str]]:
    """Return a function that logs entries a number of times each, and returns the lines by the number of the entry."""

    def run(trainer: Any, *entries: tuple[int, Entry]) -> dict[int, str]:
        found = {}
        lines()
        for number, values in enumerate((values for times, values in entries for _ in range(times)), 1):
            log(trainer, values)
            if new := lines():
                found[number] = "; ".join(new)
        return found

    return run


def assert_said(found: dict[int, str], expected: Mapping[int, list[str]]) -> None:
    assert found.keys() == expected.keys()
    for number, parts in expected.items():
        assert [part for part in parts if part not in found[number]] == [], found[number]


@pytest.mark.parametrize(
    ("entries", "settings", "model", "expected"),
    [
        ([(5, ZERO)], {}, plain, {3: ["INFO: no bug: the loss is 0, grad_norm is 0.5", "beta * KL = 0 * 0 = 0. Its"]}),
        ([(2, ZERO), (1, LEARNING), (3, ZERO)], {}, plain, {6: ["no bug"]}),
        ([(2, ZERO), (1, {"loss": 0.0, "grad_norm": 0.5}), (1, ZERO)], {}, plain, {4: ["no bug"]}),
        (
            [(3, {**ZERO, "loss": -4e-5, "kl": [0.001, 0.003]})],
            {"beta": 0.1},
            plain,
            {3: ["the loss is 4e-05", "beta * KL = 0.1 * 0.002 = 0.0002. Its"]},
        ),
        ([(3, {**ZERO, "kl": [10 * SHOWN_AS_ZERO]})], {"beta": 1.0}, plain, {3: ["beta * KL = 1 * 0.0005 = 0.0005"]}),
        ([(3, ZERO)], {"beta": 1.0}, plain, {3: ["beta * KL = 1 * 0 = 0"]}),
        ([(3, ZERO)], CHECKPOINTING, plain, {3: ["no bug"]}),
        ([(3, ZERO)], {**CHECKPOINTING, "gradient_checkpointing": False}, frozen, {3: ["no bug"]}),
        ([(3, ZERO)], NOT_REENTRANT, frozen, {3: ["no bug"]}),
        ([(3, ZERO)], CHECKPOINTING, frozen_with_hook, {3: ["no bug"]}),
    ],
)
def test_the_third_zero_in_a_row_with_a_gradient_is_no_bug(
    said: Any, entries: Any, settings: Any, model: Any, expected: Any
) -> None:
    assert_said(said(stub(model(), **settings), *entries), expected)


REWARDS = {"rewards/a/mean": [0.5], "rewards/a/std": [0.0], "rewards/b": [0.0, 0.5], "completions/length": [9.0]}
OF_REWARDS = ["WARNING: no learning signal so far", "first 10 generations", "nothing is trained", ": a (mean 0.5), b"]


@pytest.mark.parametrize(
    ("entries", "settings", "expected"),
    [
        ([(25, NO_SIGNAL)], {}, {10: ["first 10 generations"]}),
        ([(12, {**NO_SIGNAL, **REWARDS})], {}, {10: [*OF_REWARDS, "b (mean 0.25)"]}),
        ([(12, {**NO_SIGNAL, "reward_std": [0.0, 0.0]})], {}, {5: ["first 10 generations"]}),
        ([(12, without_share())], {}, {10: ["no learning signal"]}),
        ([(12, {**NO_SIGNAL, "reward_std": [0.3]})], {"scale_rewards": "batch"}, {10: ["no learning signal"]}),
        (
            [(12, {**NO_SIGNAL, "reward_std": [9e-7], "frac_reward_zero_std": [0.0]})],
            {},
            {10: ["no learning signal"]},
        ),
        ([(12, {**NO_SIGNAL, "grad_norm": 0.5})], {}, {10: ["no learning signal"]}),
        (
            [(12, {**NO_SIGNAL, "loss": 1.45e-4, "grad_norm": 0.5, "kl": [1e-5]})],
            {"beta": 1.0},
            {10: ["the KL term alone moves the policy"]},
        ),
        ([(1, {"loss": 0.0}), (12, NO_SIGNAL)], {}, {11: ["first 10 generations"]}),
        ([(10, NO_SIGNAL), (12, NO_GRADIENT)], {}, {10: ["no learning signal"], 20: ["no gradient"]}),
    ],
)
def test_ten_generations_of_equal_rewards_have_no_signal(said: Any, entries: Any, settings: Any, expected: Any) -> None:
    assert_said(said(stub(**settings), *entries), expected)


NUMBERS = "In numbers: the optimizer has 1 of 1 parameter tensors; gradient checkpointing is off; "
CUT = {**NO_GRADIENT, "completions/clipped_ratio": [1.0]}
HALF_CUT = {**NO_GRADIENT, "completions/clipped_ratio": [1.0, 0.0]}
MASKING = {"mask_truncated_completions": True}


@pytest.mark.parametrize(
    ("entries", "settings", "model", "expected"),
    [
        (
            [(25, NO_GRADIENT)],
            {},
            plain,
            {
                10: [
                    "WARNING: no gradient",
                    "in all 10 logged steps, with rewards that differ. ",
                    NUMBERS,
                    "inputs are on",
                ]
            },
        ),
        ([(12, without_share(reward_std=[1e-6]))], {}, plain, {10: ["no gradient"]}),
        ([(12, {**NO_GRADIENT, "reward_std": [1e-6]})], {}, plain, {10: ["no gradient"]}),
        ([(22, without_share(reward_std=[0.0, 0.3]))], {}, plain, {20: ["no gradient"]}),
        ([(22, {**NO_GRADIENT, "frac_reward_zero_std": [0.0, 1.0]})], {}, plain, {20: ["in all 20 logged steps"]}),
        ([(42, NO_GRADIENT)], {"fp16": True}, plain, {40: ["in all 40 logged steps"]}),
        (
            [(12, NO_GRADIENT)],
            {"is_deepspeed_enabled": True},
            plain,
            {10: ["differ. In numbers: gradient checkpointing"]},
        ),
        ([(12, CUT)], MASKING, plain, {10: ["differ; every completion was cut off, and"]}),
        ([(12, CUT)], {}, plain, {10: ["with rewards that differ. In"]}),
        ([(12, HALF_CUT)], MASKING, plain, {10: ["with rewards that differ. In"]}),
        (
            [(12, NO_GRADIENT)],
            CHECKPOINTING,
            frozen,
            {10: ["gradient checkpointing is on; gradients of the inputs are off"]},
        ),
        ([(12, NO_GRADIENT)], {}, frozen_with_hook, {10: ["gradients of the inputs are on"]}),
        (
            [(12, NO_GRADIENT)],
            {},
            without_embedding,
            {10: ["of 2 parameter tensors", "gradients of the inputs are on"]},
        ),
    ],
)
def test_no_gradient_at_all_is_reported_when_groups_with_a_signal_add_up_to_ten(
    said: Any, entries: Any, settings: Any, model: Any, expected: Any
) -> None:
    assert_said(said(stub(model(), **settings), *entries), expected)


def test_an_optimizer_without_parameters_is_reported_at_once(said: Any) -> None:
    expected = "no gradient: nothing was trainable when training began. In numbers: the optimizer has 0 of 1 parameter"
    assert_said(said(stub(optimizer=NOTHING), (6, LEARNING)), {1: ["WARNING: ", expected]})


def test_frozen_adapters_are_counted(said: Any) -> None:
    trainer = stub(with_adapter().requires_grad_(False), optimizer=NOTHING)
    expected = "0 of 7 parameter tensors; of adapter default, 4 of 4 are frozen; "
    assert_said(said(trainer, (6, LEARNING)), {1: [expected]})


@pytest.mark.parametrize(
    ("times", "values", "settings", "model"),
    [
        (25, LEARNING, {}, plain),
        (25, LEARNING, {"optimizer": NOTHING, "is_deepspeed_enabled": True}, plain),
        # A loss besides the rewards, which are equal.
        (25, {**NO_SIGNAL, "loss": -0.1, "grad_norm": 0.5}, {}, plain),
        (25, {**NO_SIGNAL, "loss": SHOWN_AS_ZERO}, {}, plain),
        (25, {**NO_SIGNAL, "loss": 1.55e-4, "kl": [1e-5]}, {"beta": 1.0}, plain),
        # Another rank; an evaluation; what a callback logs.
        (25, NO_SIGNAL, {"main": False}, plain),
        (25, {"eval_loss": 0.0, "reward_std": [0.0]}, {}, plain),
        (25, {"grad_norm": 0.0, "reward_std": [0.0]}, {"optimizer": NOTHING}, plain),
        # Too few steps.
        (2, ZERO, {}, plain),
        (9, {**NO_SIGNAL, "grad_norm": 0.5}, {}, plain),
        (9, NO_GRADIENT, {}, plain),
        (39, NO_GRADIENT, {"fp16": True}, plain),
        # The loss is not 0, or the gradient is none.
        (5, {**ZERO, "loss": SHOWN_AS_ZERO}, {}, plain),
        (5, {**ZERO, "loss": -0.1}, {}, plain),
        (5, {**ZERO, "kl": [5.1e-4]}, {"beta": 1.0}, plain),
        (5, {**ZERO, "grad_norm": math.inf}, {}, plain),
        (25, {**ZERO, "grad_norm": -1.0}, {}, plain),
        (5, {**ZERO, "grad_norm": 1e-6}, {}, plain),
        (5, {"loss": 0.0, "reward_std": [0.3]}, {}, plain),
        (5, ZERO, CHECKPOINTING, frozen),
        # The share of the batch, or of no generation.
        (25, NO_GRADIENT, {"scale_rewards": "batch"}, plain),
        (25, NO_GRADIENT, {"multi_objective_aggregation": "normalize_then_sum"}, plain),
        (25, {"loss": 0.0, "grad_norm": 0.0}, {}, plain),
    ],
)
def test_a_run_without_a_proof_gets_no_line(
    said: Any, times: int, values: Entry, settings: dict[str, Any], model: Any
) -> None:
    assert said(stub(model(), **settings), (times, values)) == {}


@pytest.mark.parametrize(
    "entries", [[(1, LEARNING), (25, NO_SIGNAL)], [(9, NO_GRADIENT), (1, LEARNING), (25, NO_GRADIENT)]]
)
def test_a_run_that_was_healthy_once_gets_no_line(said: Any, entries: Any) -> None:
    assert said(stub(), *entries) == {}


def test_each_run_has_its_own_case(said: Any) -> None:
    first, second = stub(), stub()
    assert said(first, (2, ZERO)) == {}
    assert said(second, (2, ZERO)) == {}
    assert_said(said(first, (1, ZERO)), {1: ["no bug"]})
    assert_said(said(second, (1, ZERO)), {1: ["no bug"]})


@pytest.mark.parametrize("values", [ZERO, {"eval_loss": 0.0, "reward_std": [0.0]}])
def test_what_is_logged_stays_as_it_is(values: Entry, lines: Any, switch: Any) -> None:
    def history() -> Any:
        trainer = stub(optimizer=NOTHING)
        for _ in range(3):
            log(trainer, values)
        return trainer.state.log_history

    patched = history()
    lines()
    with switch.off():
        assert history() == patched
    assert len(patched) == 3
    assert lines() == []


def initialise(*modules: str) -> Callable[[Any], Any]:
    """Return what a constructor does that sets the adapter of these modules to 0."""

    def become(model: Any) -> Any:
        for name, tensor in model.named_parameters():
            if any(f".{module}.lora_" in name for module in modules):
                tensor.data.zero_()
        return model

    return become


@pytest.fixture
def fate(lines: Any) -> Callable[..., tuple[Any, str]]:
    """Return a function that constructs a trainer with a model, and returns both it and the lines that were logged.

    The wrapper is called with a constructor in which ``become`` makes the trainer's model of the given one.
    """

    def construct(
        given: Any, peft_config: Any = None, become: Callable[[Any], Any] = lambda model: model, **settings: Any
    ) -> tuple[Any, str]:
        def constructor(model: Any, peft_config: Any = None) -> None:
            trainer.model = become(model)

        trainer = stub(**settings)
        lines()
        say_what_became_of_the_adapter(Call(constructor, trainer, (given,), {"peft_config": peft_config}))
        return trainer, "; ".join(lines())

    return construct


CONFIG = object()


def test_a_second_adapter_puts_the_trained_one_aside(fate: Any) -> None:
    trained = with_adapter()
    start = "WARNING: peft_config was given with a model that has a trained adapter already: its 4 tensors were "
    _, found = fate(trained, CONFIG)
    assert found.startswith(f"{start}put aside, and the run starts without them")
    _, found = fate(trained, CONFIG, lambda model: torch.nn.Sequential(model))
    assert found.startswith(f"{start}put aside, and the run starts without them")


def test_a_trained_adapter_is_merged(fate: Any) -> None:
    _, found = fate(with_adapter(), CONFIG, lambda model: torch.nn.Linear(1, 1))
    assert "its 4 tensors were merged into the base model" in found


def test_a_trained_adapter_is_initialised_again(fate: Any) -> None:
    _, found = fate(with_adapter(), CONFIG, initialise("q"))
    assert "its 4 tensors were initialised again in 2 cases, and" in found


def test_an_adapter_that_is_new_or_goes_on_gets_no_line(fate: Any) -> None:
    trained, new = with_adapter(), with_adapter()
    initialise("q")(new)
    for model, config in ((trained, None), (new, CONFIG), (torch.nn.Linear(1, 1), CONFIG)):
        assert fate(model, config)[1] == ""


def test_the_main_process_alone_says_what_became_of_an_adapter(fate: Any) -> None:
    assert fate(with_adapter(), CONFIG, main=False)[1] == ""


def test_an_adapter_that_was_loaded_for_inference_is_reported_once(fate: Any, said: Any) -> None:
    model = with_adapter().requires_grad_(False)
    model.peft_config["default"].inference_mode = True
    trainer, found = fate(model, optimizer=NOTHING)
    assert found.startswith("WARNING: 0 of 7 parameter tensors are trainable, since the adapter (default) was loaded")
    assert said(trainer, (6, LEARNING)) == {}
    assert "put aside" in fate(model, CONFIG)[1]


def test_an_adapter_for_inference_that_is_trained_gets_no_line_nor_does_a_frozen_one(fate: Any) -> None:
    frozen_adapter, trained = with_adapter().requires_grad_(False), with_adapter()
    trained.peft_config["default"].inference_mode = True
    assert fate(frozen_adapter)[1] == ""
    assert fate(trained)[1] == ""


@pytest.mark.parametrize("option", ["use_liger_loss", "use_liger_kernel"])
def test_the_liger_loss_goes_past_the_adapter_of_the_head(fate: Any, option: str) -> None:
    _, found = fate(with_adapter(), **{option: True})
    start = "WARNING: the Liger loss goes past an adapter: no gradient reaches the 2 adapter tensors of the LM head."
    assert found.startswith(start)


def test_the_liger_loss_goes_past_prompt_learning(fate: Any) -> None:
    model = with_adapter("q")
    model.peft_config["prompt"] = SimpleNamespace(is_prompt_learning=True)
    _, found = fate(model, use_liger_loss=True)
    assert "past an adapter: no gradient reaches prompt learning (prompt)." in found


def test_the_liger_loss_reaches_the_other_adapters(fate: Any) -> None:
    frozen_head = with_adapter()
    frozen_head.base_model.model.lm_head.requires_grad_(False)
    for model in (with_adapter("q"), torch.nn.Linear(1, 1), frozen_head):
        assert fate(model, use_liger_loss=True)[1] == ""
    assert fate(with_adapter())[1] == ""
