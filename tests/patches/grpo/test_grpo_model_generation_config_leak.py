"""Completions are sampled with what the trainer asks for, and the checkpoint keeps its own generation config."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig

from trl_hotfix.call import Call
from trl_hotfix.patches.grpo.grpo_model_generation_config_leak import sample_as_the_trainer_says
from trl_hotfix.testing import completions_of, default_arguments, stub_that_generates, wrapped_like_deepspeed

pytestmark = pytest.mark.skipif(
    not Version("4.50") <= Version(transformers.__version__) < Version("5.0.0.dev0"),
    reason="this transformers takes what it is given",
)

MODULES = {method: importlib.import_module(f"trl.trainer.{method.lower()}_trainer") for method in ("GRPO", "RLOO")}


def class_of(method: str) -> Any:
    return getattr(MODULES[method], f"{method}Trainer")


each_method = pytest.mark.parametrize(
    # RLOO before 0.22 generates in a training loop of its own.
    "method",
    [name for name in MODULES if name == "GRPO" or hasattr(class_of(name), "_generate_and_score_completions")],
)

SHIPPED = {"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3, "typical_p": 0.7}
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "repetition_penalty": 1.0, "typical_p": 1.0}
"""Of the library. transformers takes those of the checkpoint in their place."""
OTHERS = {"temperature": 0.9, "top_p": 0.8, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.1, "typical_p": 0.9}

WITH_TYPICAL_P = {"typical_p": 1.0}
"""The trainers have no argument of this name."""


class Sampled(Exception):
    """What transformers samples with."""


class Model(torch.nn.Module, transformers.GenerationMixin):
    """A model whose ``generate`` ends where the settings are known."""

    is_gradient_checkpointing = False

    def __init__(self, **shipped: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        # The trainers do not ask for the last one.
        self.generation_config = GenerationConfig(do_sample=True, no_repeat_ngram_size=2)
        vars(self.generation_config).update(shipped)
        self.own = self.generation_config
        self.before = copy.deepcopy(vars(self.own))

    def generate(self, *args: Any, generation_config: Any, **kwargs: Any) -> None:
        # That of transformers begins with this call.
        raise Sampled(self._prepare_generation_config(generation_config)[0], self.generation_config)

    @property
    def keeps_its_config(self) -> bool:
        return self.generation_config is self.own and vars(self.own) == self.before


class Run:
    """A trainer that asks for some settings, whose model ships others."""

    def __init__(self, method: str, model: Model, *, more: Any = WITH_TYPICAL_P, **asked_for: Any) -> None:
        self.method, self.model = method, model
        config = GenerationConfig(do_sample=True, eos_token_id=1)
        vars(config).update({**(more or {}), **asked_for})
        arguments = default_arguments(getattr(MODULES[method], f"{method}Config"), generation_kwargs=more)
        engine = wrapped_like_deepspeed(model)
        engine.config = model.config
        self.trainer = stub_that_generates(class_of(method), arguments, engine, generation_config=config)
        self.trainer.accelerator.unwrap_model = lambda *args, **kwargs: model

    def sampled(self, step: int = 0, training: bool = True) -> dict[str, Any]:
        """Return the settings with which completions are sampled."""
        self.trainer.state.global_step = step
        self.trainer.model.train(training)
        self.trainer.control.should_evaluate = not training
        # 0.14.0 generates in the method that computes the loss.
        in_loss = "_get_train_sampler" not in vars(class_of(self.method))
        with pytest.raises(Sampled) as sampled:
            self.trainer.compute_loss(self.trainer.model, [{"prompt": "a"}]) if in_loss else completions_of(
                self.trainer
            )
        used, self.meanwhile = sampled.value.args
        assert used.no_repeat_ngram_size == 2
        return {name: getattr(used, name) for name in SHIPPED}


@each_method
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_generation_is_sampled_with_the_defaults_that_the_trainer_asks_for(method: str, training: bool) -> None:
    run = Run(method, Model(**SHIPPED), **DEFAULTS)
    for step in (0, 0, 1):
        assert run.sampled(step, training) == DEFAULTS


@each_method
def test_trl_samples_as_the_checkpoint_says(method: str, switch: Any) -> None:
    with switch.off():
        assert Run(method, Model(**SHIPPED), **DEFAULTS).sampled() == SHIPPED


@each_method
@pytest.mark.parametrize("name", list(SHIPPED))
def test_each_setting_alone_is_the_trainers(method: str, name: str) -> None:
    run = Run(method, Model(**{name: SHIPPED[name]}), **DEFAULTS)
    assert run.sampled() == DEFAULTS


@each_method
@pytest.mark.parametrize("more", [None, {}])
def test_what_the_trainer_has_no_argument_for_is_the_checkpoints(method: str, more: Any) -> None:
    run = Run(method, Model(**SHIPPED), more=more, **DEFAULTS)
    assert run.sampled() == {**DEFAULTS, "typical_p": SHIPPED["typical_p"]}


@each_method
def test_an_argument_that_the_library_does_not_know_is_handed_on(method: str) -> None:
    run = Run(method, Model(**SHIPPED, its_own=2), more={"its_own": 1}, **DEFAULTS)
    assert run.sampled() == {**DEFAULTS, "typical_p": SHIPPED["typical_p"]}
    assert run.meanwhile.its_own == 2


@each_method
@pytest.mark.parametrize("name", list(SHIPPED))
def test_one_setting_that_is_no_default_stays_beside_the_others(method: str, name: str) -> None:
    run = Run(method, Model(**SHIPPED), **{**DEFAULTS, name: OTHERS[name]})
    assert run.sampled() == {**DEFAULTS, name: OTHERS[name]}
    # It is the checkpoint's in the copy too.
    assert getattr(run.meanwhile, name) == SHIPPED[name]


@each_method
@pytest.mark.parametrize(("shipped", "asked_for"), [(SHIPPED, OTHERS), ({}, DEFAULTS), (OTHERS, OTHERS)])
def test_where_nothing_is_merged_nothing_changes(method: str, shipped: Any, asked_for: Any) -> None:
    run = Run(method, Model(**shipped), **asked_for)
    assert run.sampled() == asked_for
    assert run.meanwhile is run.model.own


@each_method
def test_the_model_has_a_copy_meanwhile_and_its_own_config_afterwards(method: str) -> None:
    run = Run(method, Model(**SHIPPED), **DEFAULTS)
    run.sampled()
    assert run.meanwhile is not run.model.own
    assert run.model.keeps_its_config


@each_method
def test_each_trainer_of_a_model_samples_with_its_own_settings(method: str) -> None:
    model = Model(**SHIPPED)
    runs = [Run(method, model, **asked_for) for asked_for in (DEFAULTS, OTHERS)]
    for run, expected in zip([*runs, *runs], [DEFAULTS, OTHERS] * 2, strict=True):
        assert run.sampled() == expected
        assert model.keeps_its_config


@each_method
def test_a_trainer_without_a_config_samples_as_the_checkpoint_says(method: str) -> None:
    run = Run(method, Model(**SHIPPED), **DEFAULTS)
    run.trainer.generation_config = None
    assert run.sampled() == SHIPPED
    assert run.meanwhile is run.model.own


@pytest.mark.parametrize("attributes", [{}, {"generation_config": None}])
@pytest.mark.parametrize("lacks_it", ["model", "trainer"])
def test_without_a_config_the_call_is_made_as_it_came(attributes: dict[str, Any], lacks_it: str) -> None:
    model, has_one = torch.nn.Module(), {"generation_config": GenerationConfig(temperature=0.5)}
    vars(model).update(attributes if lacks_it == "model" else has_one)
    of_trainer = attributes if lacks_it == "trainer" else {"generation_config": GenerationConfig()}
    call = Call(lambda: "sampled", SimpleNamespace(model=model, args=SimpleNamespace(), **of_trainer))
    assert sample_as_the_trainer_says(call) == "sampled"
    assert call.is_unchanged()
    assert not call.acted
