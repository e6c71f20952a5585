"""The coefficient of a model's config is used where the arguments have the default, and nothing of that stays."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from trl_hotfix.authoring import Call
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.grpo.moe_aux_coef_ignores_model_config import use_coefficient_of_config
from trl_hotfix.testing import StopConstruction, default_arguments, recorded_warnings, tiny_causal_lm, tiny_tokenizer

(PATCH,) = (patch for patch in loading.load() if patch.id == "moe-aux-coef-ignores-model-config")
METHODS = [target.attribute.partition("Trainer")[0] for target in gates.targets_here(PATCH)]

DEFAULT, DECLARED, CHOSEN = 0.001, 0.5, 0.25


def begun(method: str, *, callbacks: Any = None, **settings: Any) -> Any:
    """Run a real constructor on a superclass that only calls the callbacks, until it has set its metrics."""
    module = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
    trainer_class, config_class = getattr(module, f"{method}Trainer"), getattr(module, f"{method}Config")

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, args: Any, callbacks: Any, **kwargs: Any) -> None:
            self.model, self.args, self.accelerator = model, args, SimpleNamespace(parallelism_config=None)
            self.callbacks = callbacks
            for callback in callbacks or []:
                callback.on_init_end(args, SimpleNamespace(is_world_process_zero=False), None, model=model)

    class Stub(trainer_class, Parent):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_metrics":
                raise StopConstruction

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    text = SimpleNamespace(router_aux_loss_coef=DECLARED, output_router_logits=False)
    config: Any = SimpleNamespace(get_text_config=lambda: text, _attn_implementation="sdpa")
    model = tiny_causal_lm(config)
    model.generation_config = SimpleNamespace(eos_token_id=None)
    by_method: dict[str, Any] = {"SFT": {"loss_type": "nll"}, "GRPO": {"beta": 0.0}, "RLOO": {"beta": 0.0}}
    sizes = {"n_gpu": 0, "steps_per_generation": 1, "generation_batch_size": 8}
    args = default_arguments(config_class, **sizes, **by_method.get(method, {}), **settings)
    extra: dict[str, Any] = {"ref_model": tiny_causal_lm(config)} if method in ("DPO", "KTO") else {"reward_funcs": len}
    trainer: Any = object.__new__(Stub)
    with suppress(StopConstruction):
        Stub.__init__(
            trainer,
            model=model,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
            processing_class=tiny_tokenizer(),
            callbacks=callbacks,
            **({} if method == "SFT" else extra),
        )
    return trainer


def coefficient_of(trainer: Any) -> float:
    """Return the coefficient of a trainer that uses it. Up to 1.14.0 SFT has it in the config of the model."""
    assert trainer.aux_loss_enabled
    text = trainer.model.config.get_text_config()
    return float(getattr(trainer, "router_aux_loss_coef", text.router_aux_loss_coef))


@pytest.mark.parametrize("method", METHODS)
def test_each_trainer_has_the_coefficient_of_the_config(method: str) -> None:
    for _ in range(2):
        trainer = begun(method)
        assert coefficient_of(trainer) == DECLARED
        assert trainer.model.config.get_text_config().router_aux_loss_coef == DECLARED
        assert trainer.args.router_aux_loss_coef == DEFAULT


@pytest.mark.parametrize("method", METHODS)
def test_a_coefficient_that_is_set_wins(method: str) -> None:
    trainer = begun(method, router_aux_loss_coef=CHOSEN)
    assert (coefficient_of(trainer), trainer.args.router_aux_loss_coef) == (CHOSEN, CHOSEN)


@pytest.mark.parametrize("method", METHODS)
def test_the_callbacks_of_the_user_come_first(method: str) -> None:
    own = TrainerCallback()
    given = [own]
    trainer = begun(method, callbacks=given)
    assert trainer.callbacks[0] is own
    assert given == [own]


@pytest.mark.parametrize("method", METHODS)
def test_trl_uses_the_default_of_the_arguments(method: str, switch: Any) -> None:
    with switch.off():
        assert coefficient_of(begun(method)) == DEFAULT


class Trainer:
    """It reads the coefficient before its callbacks are called, as GRPO does."""

    router_aux_loss_coef, aux_loss_enabled = DEFAULT, True

    def construct(self, config: Mapping[str, Any], args: Any, is_main: bool, callbacks: list[Any] | None) -> str:
        text = SimpleNamespace(**config)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
        self.callbacks = callbacks or []
        for callback in self.callbacks:
            callback.on_init_end(args, SimpleNamespace(is_world_process_zero=is_main), None, model=model)
        self.while_constructing = args.router_aux_loss_coef
        if "fails" in config:
            raise StopConstruction
        return "constructed"

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)


def constructed(config: Mapping[str, Any], *, is_main: bool = True, callbacks: Any = None) -> tuple[Any, list[str]]:
    """Return a stand-in for a trainer with default arguments, and what is warned of."""
    trainer = Trainer()
    trainer.args = SimpleNamespace(router_aux_loss_coef=DEFAULT)
    with recorded_warnings() as messages:
        call = Call(trainer.construct, trainer, (config, trainer.args, is_main, callbacks))
        assert use_coefficient_of_config(call) == "constructed"
    assert trainer.args.router_aux_loss_coef == DEFAULT
    assert trainer.callbacks == (callbacks or [])
    return trainer, messages


ROUTERS = {"output_router_logits": False}


@pytest.mark.parametrize("coefficient", [0.5, 0.0, 1])
@pytest.mark.parametrize("callbacks", [None, [], [TrainerCallback()]], ids=["None", "none", "one"])
def test_it_is_set_while_the_trainer_is_made_and_a_warning_states_it(coefficient: float, callbacks: Any) -> None:
    trainer, messages = constructed({**ROUTERS, "router_aux_loss_coef": coefficient}, callbacks=callbacks)
    assert trainer.router_aux_loss_coef == trainer.while_constructing == coefficient
    assert trainer.aux_loss_enabled is (coefficient != 0)
    assert [f"router_aux_loss_coef is {coefficient:g} in" in message for message in messages] == [True]


def test_the_main_process_alone_warns() -> None:
    trainer, messages = constructed({**ROUTERS, "router_aux_loss_coef": 0.5}, is_main=False)
    assert (trainer.router_aux_loss_coef, messages) == (0.5, [])


@pytest.mark.parametrize(
    "config",
    [
        {**ROUTERS, "router_aux_loss_coef": DEFAULT},
        {**ROUTERS, "router_aux_loss_coef": None},
        ROUTERS,
        {"router_aux_loss_coef": 0.5},
    ],
    ids=["the default", "no value", "no coefficient", "no routers"],
)
def test_a_config_that_says_nothing_else_leaves_the_argument(config: dict[str, Any]) -> None:
    trainer, messages = constructed(config)
    assert trainer.router_aux_loss_coef == trainer.while_constructing == DEFAULT
    assert (trainer.aux_loss_enabled, messages) == (True, [])


def test_the_arguments_are_as_before_if_the_constructor_fails() -> None:
    trainer, args = Trainer(), SimpleNamespace(router_aux_loss_coef=DEFAULT)
    config = {**ROUTERS, "router_aux_loss_coef": 0.5, "fails": True}
    with recorded_warnings(), pytest.raises(StopConstruction):
        use_coefficient_of_config(Call(trainer.construct, trainer, (config, args, True, None)))
    assert (trainer.while_constructing, args.router_aux_loss_coef) == (0.5, DEFAULT)
