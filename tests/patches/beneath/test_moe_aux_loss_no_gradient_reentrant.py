"""Reentrant checkpointing is switched off where nobody chose it, and named where somebody did; other runs stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers import TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments

import tiny
from tiny.beginning import about_to_train

ID = "moe-aux-loss-no-gradient-reentrant"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.name: target for target in gates.targets_here(PATCH)}
IS_REENTRANT = transformers.__version__.startswith("4.")
LOADER = object()


def model_of(coefficient: float = 0.5, *, asked: bool = True, of_images: bool = False) -> Any:
    config = SimpleNamespace(output_router_logits=asked, router_aux_loss_coef=coefficient)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config) if of_images else config)


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Any:
    """The method of each class that makes the loader of a training."""
    return TARGETS[request.param]


def trainer_of(target: Any, model: Any, settings: Any, *, on: bool = True, main: bool = True, **state: Any) -> Any:
    args = default_arguments(TrainingArguments, process_index=0, precompute_ref_log_probs=False)
    args.gradient_checkpointing, args.gradient_checkpointing_kwargs = on, settings
    return about_to_train(target, args, LOADER, main=main, model=model, **state)


def begin(target: Any, trainer: Any) -> tuple[Any, int | None]:
    """Begin to train, and return the settings of the checkpointing, and in how many calls the patch acted."""
    assert trainer.get_train_dataloader() is LOADER
    return trainer.args.gradient_checkpointing_kwargs, tiny.acts(ID, target.name, trainer)


@pytest.mark.skipif(not IS_REENTRANT, reason="transformers 5 is not reentrant by default")
@pytest.mark.parametrize("settings", [None, {}, {"preserve_rng_state": False}], ids=str)
@pytest.mark.parametrize("of_images", [False, True], ids=["text", "images"])
def test_the_default_is_switched_off(target: Any, messages: list[str], settings: Any, of_images: bool) -> None:
    before = dict(settings or {})
    found = begin(target, trainer_of(target, model_of(of_images=of_images), settings))
    assert found == ({**before, "use_reentrant": False}, 1)
    assert settings is None or settings == before
    assert messages == []


@pytest.mark.skipif(IS_REENTRANT, reason="transformers 4 is reentrant by default")
def test_a_default_that_is_not_reentrant_is_left_alone(target: Any, messages: list[str]) -> None:
    assert begin(target, trainer_of(target, model_of(), None)) == (None, 0)
    assert messages == []


def test_a_choice_is_named_with_what_to_do_and_kept(target: Any, messages: list[str]) -> None:
    trainer = trainer_of(target, model_of(), {"use_reentrant": True})
    assert begin(target, trainer) == ({"use_reentrant": True}, 1)
    assert messages == [
        f"{target.attribute.partition('.')[0]}: the router auxiliary loss has no gradient, since gradient "
        "checkpointing is reentrant: nothing balances the experts. Set gradient_checkpointing_kwargs="
        "{'use_reentrant': False}, or gradient_checkpointing=False. TRL forces reentrant checkpointing with PEFT "
        "under ZeRO-3"
    ]
    begin(target, trainer)
    begin(target, trainer_of(target, model_of(), {"use_reentrant": True}))
    assert len(messages) == 2


def test_the_main_process_alone_names_it(target: Any, messages: list[str]) -> None:
    begin(target, trainer_of(target, model_of(), {"use_reentrant": True}, main=False))
    assert messages == []


@pytest.mark.parametrize(
    ("model", "state"),
    [
        (model_of(0.0), {}),
        (model_of(asked=False), {}),
        (SimpleNamespace(config=SimpleNamespace()), {}),
        (SimpleNamespace(config=SimpleNamespace(output_router_logits=True)), {}),
        (SimpleNamespace(config=SimpleNamespace(router_aux_loss_coef=0.5)), {}),
        (SimpleNamespace(), {}),
        (model_of(), {"on": False}),
        (model_of(), {"is_in_train": False}),
    ],
    ids=[
        "coefficient 0",
        "not asked for",
        "dense",
        "no coefficient",
        "never asked for",
        "no config",
        "no checkpointing",
        "no training",
    ],
)
@pytest.mark.parametrize("settings", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_healthy_runs_are_left_alone(
    target: Any, messages: list[str], model: Any, state: dict[str, Any], settings: Any
) -> None:
    assert begin(target, trainer_of(target, model, settings, **state)) == (settings, 0)
    assert messages == []


@pytest.mark.parametrize("settings", [None, {"use_reentrant": True}], ids=str)
def test_a_trainer_that_never_trained_is_left_alone(target: Any, messages: list[str], settings: Any) -> None:
    trainer = trainer_of(target, model_of(), settings)
    del trainer.is_in_train
    assert begin(target, trainer) == (settings, 0)
    assert messages == []


def test_checkpointing_that_is_not_reentrant_is_left_alone(target: Any, messages: list[str]) -> None:
    settings = {"use_reentrant": False}
    assert begin(target, trainer_of(target, model_of(), settings)) == (settings, 0)
    assert messages == []


def test_without_the_patch_nothing_changes(target: Any, messages: list[str], switch: Any) -> None:
    with switch.off():
        for settings in (None, {"use_reentrant": True}):
            assert begin(target, trainer_of(target, model_of(), settings))[0] == settings
    assert messages == []
