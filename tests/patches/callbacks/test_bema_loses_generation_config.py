"""The averaged model has the generation config of the trained one, or its own where transformers could not save it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from trl.trainer.callbacks import BEMACallback

import tiny

ID = "bema-loses-generation-config"


def sampled() -> Any:
    return GenerationConfig(eos_token_id=[1, 5], do_sample=True, temperature=0.7)


def begun(model: Any) -> tuple[Any, int]:
    """Return the callback of a training of ``model`` that has begun, and how often the patch has acted."""
    callback = BEMACallback()
    with tiny.counted(ID) as count:
        callback.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    return callback, count().acted


@pytest.fixture
def model(tmp_path: Path) -> Any:
    model = tiny.llama(str(tmp_path), seed=0)
    model.generation_config = sampled()
    return model


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_the_averaged_model_is_saved_with_it(model: Any, tmp_path: Path, wrapped: bool) -> None:
    callback, acts = begun(SimpleNamespace(module=model) if wrapped else model)
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_end(SimpleNamespace(output_dir=str(tmp_path)), state, None, model=model)
    assert GenerationConfig.from_pretrained(tmp_path / "bema") == sampled()
    assert acts == 1


def test_it_is_a_copy(model: Any) -> None:
    callback, _ = begun(model)
    model.generation_config.eos_token_id.append(7)
    model.generation_config.temperature = 0.1
    assert callback.running_model.generation_config == sampled()


def test_trl_has_that_of_the_config(model: Any, switch: Any) -> None:
    with switch.off():
        callback, _ = begun(model)
    assert callback.running_model.generation_config == GenerationConfig.from_model_config(model.config)


def test_the_averages_begin_with_the_same_weights(model: Any, switch: Any) -> None:
    patched = begun(model)[0].running_model.state_dict()
    with switch.off():
        unpatched = begun(model)[0].running_model.state_dict()
    assert patched.keys() == unpatched.keys()
    assert all(weight.equal(unpatched[name]) for name, weight in patched.items())


def test_a_generation_config_that_cannot_be_saved_stays_out(model: Any, tmp_path: Path) -> None:
    model.generation_config = sampled()
    model.generation_config.do_sample = False
    with pytest.raises(ValueError, match="generation"):
        model.generation_config.save_pretrained(tmp_path)
    callback, acts = begun(model)
    assert callback.running_model.generation_config == GenerationConfig.from_model_config(model.config)
    assert acts == 0


def test_the_generation_config_of_the_config_is_left(model: Any) -> None:
    model.generation_config = GenerationConfig.from_model_config(model.config)
    assert begun(model)[1] == 0


@pytest.mark.parametrize("has_none", [False, True], ids=["no attribute", "None"])
def test_a_model_that_does_not_generate_has_none(has_none: bool) -> None:
    class Classifier(torch.nn.Module):
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.config = config
            if has_none:
                self.generation_config = None

    callback, acts = begun(Classifier())
    assert getattr(callback.running_model, "generation_config", None) is None
    assert acts == 0
