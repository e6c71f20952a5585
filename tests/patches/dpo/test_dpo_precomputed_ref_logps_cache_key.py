"""The cache of reference log-probs has a name of its own for each setting that they depend on, and for no other."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from packaging.version import Version
from trl.trainer import dpo_trainer

from trl_hotfix.testing import default_arguments, stub_trainer

RELEASE = Version(trl.__version__)


def module_of(method: str) -> Any:
    """Return the module of a trainer. KTO is skipped where the wrapper is not on it."""
    if method == "DPO":
        return dpo_trainer
    if not Version("1.4.0") <= RELEASE < Version("1.9.0"):
        pytest.skip("KTO keeps no such file before 1.4.0, and names it by all arguments from 1.9.0 on")
    path = "trl.trainer" if Version("1.8.0") <= RELEASE else "trl.experimental.kto"
    return importlib.import_module(f"{path}.kto_trainer")


@pytest.fixture(params=["DPO", "KTO"])
def method(request: pytest.FixtureRequest) -> str:
    module_of(request.param)
    return str(request.param)


def trainer_of(method: str, collator: Any = None, **settings: Any) -> Any:
    """Return a trainer whose collator has the settings of the arguments, unless another one is given."""
    module = module_of(method)
    settings = {"max_length": 12, "truncation_mode": "keep_end", **settings}
    arguments = default_arguments(getattr(module, f"{method}Config"), **settings)
    if collator is None:
        collator = SimpleNamespace(max_length=arguments.max_length, truncation_mode=arguments.truncation_mode)
    attributes = {"model": torch.nn.Linear(1, 1), "ref_model": None, "data_collator": collator}
    trainer = stub_trainer(
        getattr(module, f"{method}Trainer"),
        arguments,
        calculate_KL=False,
        is_deepspeed_enabled=False,
        _precompute_model_hash="",
        **attributes,
    )
    torch.nn.init.ones_(trainer.model.weight)
    torch.nn.init.ones_(trainer.model.bias)
    trainer.accelerator.prepare = lambda loader: loader
    trainer.accelerator.wait_for_everyone = lambda: None
    return trainer


class FileNamed(Exception):
    """The name of the file is known."""


def name_of(trainer: Any, fingerprint: str = "the data", of: str = "train") -> str:
    """Return the fingerprint that names the file. The call ends there, and the dataset has its own again."""

    def end(named: str) -> str:
        raise FileNamed(named)

    dataset = SimpleNamespace(_fingerprint=fingerprint, _get_cache_file_path=end)
    with pytest.raises(FileNamed) as named:
        trainer._precompute_ref_logps(dataset, of, 1)
    assert dataset._fingerprint == fingerprint
    return str(named.value)


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "max_length": {"max_length": 64},
    "no max_length": {"max_length": None},
    "truncation_mode": {"truncation_mode": "keep_start"},
    "longer by the collator": {"collator": SimpleNamespace(max_length=64, truncation_mode="keep_end")},
    "shorter by the collator": {
        "max_length": 64,
        "collator": SimpleNamespace(max_length=12, truncation_mode="keep_end"),
    },
    "other end by the collator": {"collator": SimpleNamespace(max_length=12, truncation_mode="keep_start")},
    "collator without settings": {"collator": SimpleNamespace()},
    "collator without settings, max_length": {"max_length": 64, "collator": SimpleNamespace()},
}


def test_files_of_other_settings_have_other_names(method: str) -> None:
    names = [name_of(trainer_of(method, **settings)) for settings in SETTINGS.values()]
    assert len(set(names)) == len(SETTINGS)


def test_ld_alpha_is_in_the_name_of_dpo() -> None:
    of_values = [name_of(trainer_of("DPO", ld_alpha=value)) for value in (None, 0.0, 0.5)]
    assert len(set(of_values)) == 3


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_settings_have_one_name(method: str, settings: dict[str, Any]) -> None:
    training, evaluating = trainer_of(method, **settings), trainer_of(method, **settings)
    evaluating.model.eval()
    assert name_of(training) == name_of(training) == name_of(evaluating, of="eval")


def test_other_data_have_another_name(method: str) -> None:
    assert name_of(trainer_of(method)) != name_of(trainer_of(method), "other data")


@pytest.mark.parametrize("settings", [{"learning_rate": 1.0}, {"beta": 0.7}], ids=str)
def test_what_the_log_probs_do_not_depend_on_is_not_in_the_name(method: str, settings: dict[str, Any]) -> None:
    assert name_of(trainer_of(method)) == name_of(trainer_of(method, **settings))


def test_trl_names_the_files_of_all_settings_alike(method: str, switch: Any) -> None:
    with switch.off():
        assert len({name_of(trainer_of(method, **settings)) for settings in SETTINGS.values()}) == 1


def columns_of(method: str, dataset: Dataset, log_prob: float, max_length: int) -> list[list[float]]:
    """Return the columns that a run adds whose reference gives this log-prob to each row."""
    trainer = trainer_of(method, max_length=max_length)
    trainer.data_collator = list
    values = torch.tensor([log_prob])
    # KTO of 1.2 to 1.5 has other names.
    of_batch = values, values if method == "DPO" else None
    trainer.compute_ref_log_probs = trainer.compute_reference_log_probs = lambda *_: of_batch
    prepared = trainer._precompute_ref_logps(dataset, "train", 1)
    return [list(prepared[name]) for name in prepared.column_names if name.startswith("ref")]


def test_a_run_reads_the_file_of_its_own_settings_alone(method: str, tmp_path: Path) -> None:
    Dataset.from_dict({"row": [1, 2]}).to_json(tmp_path / "rows.json")
    dataset = Dataset.from_json(str(tmp_path / "rows.json"), cache_dir=str(tmp_path))
    sides = 2 if method == "DPO" else 1
    assert columns_of(method, dataset, -1.0, max_length=12) == [[-1.0, -1.0]] * sides
    assert columns_of(method, dataset, -2.0, max_length=64) == [[-2.0, -2.0]] * sides
    # The first file is read: nothing is computed again.
    assert columns_of(method, dataset, -3.0, max_length=12) == [[-1.0, -1.0]] * sides


def test_a_stream_is_refused_by_trl_and_has_no_fingerprint_afterwards(method: str) -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"row": 1}]))
    before = dict(vars(stream))
    with pytest.raises((ValueError, AttributeError)):
        trainer_of(method)._precompute_ref_logps(stream, "train", 1)
    assert vars(stream) == before
