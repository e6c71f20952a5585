"""The helpers of the proofs, in this environment: they record and pass on what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import tiny

pytest.importorskip("torch")


@dataclass
class Config:
    """A config with two of the fields that ``tiny.config`` knows defaults for."""

    output_dir: str
    max_steps: int
    beta: float = 0.0


class Trainer:
    """What every trainer of these tests has, whatever its constructor takes."""

    model = SimpleNamespace()
    train_dataset = SimpleNamespace(_fingerprint="abc")


@pytest.fixture(autouse=True)
def state() -> Iterator[Any]:
    """The state of the helpers, as before after each test."""
    before = dict(vars(tiny.state))
    vars(tiny.state).update(trained=set(), fingerprints=[], overrides={})
    yield tiny.state
    vars(tiny.state).update(before)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class of a DPO trainer that has trained two steps."""
    from trl import DPOConfig, DPOTrainer

    folder = str(tmp_path_factory.mktemp("models"))
    trainer_class = tiny.measured(DPOTrainer)
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    trainer = tiny.trainer(
        trainer_class,
        model=tiny.llama(folder, seed=0),
        ref_model=tiny.llama(folder, seed=1),
        args=tiny.config(DPOConfig, max_steps=2, max_length=16, max_prompt_length=8, learning_rate=0.1),
        train_dataset=tiny.preferences(),
        tokenizer=tokenizer,
    )
    trainer.train()
    trainer_class.logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer_class.names = {name for name, _ in trainer.model.named_parameters()}
    return trainer_class


def test_measured_records_each_loss_and_batch(dpo: Any) -> None:
    assert dpo.losses == pytest.approx(dpo.logged, abs=1e-4)
    assert len(dpo.losses) == len(dpo.batches) == len(dpo.keywords) == 2
    assert all(len(batch["chosen_input_ids"]) == 2 for batch in dpo.batches)


def test_batches_are_kept_as_they_were_before_the_call() -> None:
    import torch

    class Doubling:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            return inputs.pop("numbers").mul_(2).sum(), "outputs"

    trainer_class = tiny.measured(Doubling)
    trainer = trainer_class()
    assert trainer.compute_loss(None, {"numbers": torch.ones(3), "name": "n"}, return_outputs=True)[0] == 6
    (batch,) = trainer_class.batches
    assert (batch["numbers"].tolist(), batch["name"]) == ([1, 1, 1], "n")
    assert trainer_class.losses == [6.0]
    assert trainer_class.keywords == [{"return_outputs": True}]


def test_two_measured_classes_share_no_records() -> None:
    assert tiny.measured(Trainer).losses is not tiny.measured(Trainer).losses


def test_first_step_keeps_the_first_gradients(dpo: Any) -> None:
    assert dpo.step.gradients.keys() == dpo.names
    assert dpo.step.outputs.logits.requires_grad


def test_first_step_ignores_later_and_reference_passes() -> None:
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    step = tiny.FirstStep(model)
    with torch.no_grad():
        model(torch.tensor([[5.0]]))
    for number in (2.0, 3.0):
        model(torch.tensor([[number]])).sum().backward()
    assert step.gradients["weight"].item() == 2.0
    assert step.outputs.item() == pytest.approx(2.0 * model.weight.item())


def test_config_leaves_out_unknown_fields() -> None:
    config = tiny.config(Config, max_steps=3, beta=0.5, loss_of_another_release="grpo")
    assert (config.max_steps, config.beta) == (3, 0.5)
    assert tiny.config(Config).max_steps == 1


def test_overrides_win_over_the_settings_of_a_caller(state: Any) -> None:
    state.overrides = {"max_steps": 9}
    assert tiny.config(Config, max_steps=3).max_steps == 9


@pytest.mark.parametrize("name", ["tokenizer", "processing_class"])
def test_trainer_names_the_tokenizer_as_the_release_does(name: str) -> None:
    class OfOldRelease(Trainer):
        def __init__(self, tokenizer: Any) -> None:
            self.arguments = {"tokenizer": tokenizer}

    class OfNewRelease(Trainer):
        def __init__(self, processing_class: Any) -> None:
            self.arguments = {"processing_class": processing_class}

    trainer_class = OfOldRelease if name == "tokenizer" else OfNewRelease
    assert tiny.trainer(trainer_class, tokenizer="words").arguments == {name: "words"}


def test_parameters_are_those_of_the_class_that_was_renamed() -> None:
    class OfNewName(Trainer):
        def __init__(self, model: Any, args: Any) -> None: ...

    class OfOldName(OfNewName):
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    assert tiny.parameters(OfOldName) == {"self", "model", "args"}


def test_the_package_shows_the_state_of_the_bench(state: Any) -> None:
    state.variant = "compiled"
    tiny.trainer(type("Plain", (Trainer,), {"__init__": lambda self, model=None: None}))
    assert tiny.variant == "compiled"
    assert (tiny.trained, tiny.fingerprints) == ({"full"}, ["abc"])
    with pytest.raises(AttributeError, match="no attribute 'variants_of'"):
        _ = tiny.variants_of
