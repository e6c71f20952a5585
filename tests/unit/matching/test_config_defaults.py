"""The defaults of TRL's configs: read from files, and on record as what has changed from release to release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trl_hotfix.catalogue.data_files import data_file
from trl_hotfix.errors import DamagedError
from trl_hotfix.matching import config_defaults, sources
from trl_hotfix.matching.fingerprints import bodies

RELEASES = bodies().releases
FILES = {
    "trl/trainer/base_config.py": (
        "class _BaseConfig(TrainingArguments):\n    logging_steps: float = field(default=10)\n"
    ),
    "trl/trainer/dpo_config.py": (
        "from .base_config import _BaseConfig\n"
        "class DPOConfig(_BaseConfig):\n"
        "    _VALID = ['a']\n"
        "    beta: float = field(default=0.1, metadata={'help': 'x'})\n"
        "    loss_type: list = field(default_factory=lambda: ['sigmoid'])\n"
        "    options: dict = field(default_factory=dict)\n"
        "    required: str\n"
        "    plain: int = 3\n"
        "    def __post_init__(self): pass\n"
    ),
    "trl/trainer/model_config.py": "class ModelConfig:\n    use_peft: bool = False\n",
    "trl/trainer/gkd_config.py": (
        "from ..experimental.gkd.gkd_config import GKDConfig as _GKDConfig\nclass GKDConfig(_GKDConfig):\n    pass\n"
    ),
    "trl/experimental/gkd/gkd_config.py": "class GKDConfig(TrainingArguments):\n    lmbda: float = 0.5\n",
    "trl/experimental/cpo/cpo_config.py": "class CPOConfig:\n    if True:\n        pass\n    beta: float = 0.2\n",
}


@pytest.fixture
def release(tmp_path: Path) -> sources.Release:
    (tmp_path / "trl-1.0.0.dist-info").mkdir()
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents:
            if folder != Path():
                (tmp_path / folder / "__init__.py").touch()
    return sources.Release(tmp_path)


def test_the_defaults_are_read_with_those_of_bases_in_trl_and_without_import(release: sources.Release) -> None:
    defaults = config_defaults.defaults_of(release)
    assert defaults == {
        "CPO": {"beta": "0.2"},
        "GKD": {"lmbda": "0.5"},
        "DPO": {
            "logging_steps": "10",
            "beta": "0.1",
            "loss_type": "['sigmoid']",
            "options": "dict()",
            "required": config_defaults.REQUIRED,
            "plain": "3",
        },
    }


def test_the_record_has_what_changes_and_gives_each_release_back() -> None:
    by_release = {
        "0.9.6": {"DPO": {"beta": "0.1", "old": "1"}},
        "0.10.1": {"DPO": {"beta": "0.1", "new": "None"}, "KTO": {}},
        "0.11.0": {"KTO": {"x": "2"}},
        "0.11.1": {"DPO": {"beta": "0.2", "old": "1"}, "KTO": {"x": "2"}},
    }
    record = config_defaults.recorded(by_release)
    assert record["changes"]["DPO"]["beta"] == [("0.9.6", "0.1"), ("0.11.1", "0.2")]
    assert record["changes"]["DPO"]["old"] == [("0.9.6", "1"), ("0.10.1", None), ("0.11.1", "1")]
    assert record["releases"]["DPO"] == ["0.9.6", "0.10.1", "0.11.1"]
    text = config_defaults.as_text(record)
    assert json.loads(text) == json.loads(json.dumps(record))
    first = config_defaults.recorded({name: configs for name, configs in by_release.items() if name != "0.11.1"})
    assert config_defaults.extended(first, "0.11.1", by_release["0.11.1"]) == record


def test_the_shipped_record_has_the_installed_release_as_its_files_have_it() -> None:
    installed = sources.installed()
    assert installed is not None
    read = config_defaults.defaults_of(installed)
    assert read["DPO"]["beta"] == "0.1"
    for config, defaults in read.items():
        assert config_defaults.defaults(installed.version, config, RELEASES) == defaults


def test_every_release_on_record_has_its_configs() -> None:
    for release in RELEASES:
        defaults = config_defaults.defaults(release, "SFT", RELEASES)
        assert defaults is not None
        assert "packing" in defaults
    assert config_defaults.defaults("0.14.0", "GRPO", RELEASES) is not None
    assert config_defaults.defaults("0.13.0", "GRPO", RELEASES) is None


def test_a_release_that_is_not_on_record_is_read_where_it_is_installed() -> None:
    installed = sources.installed()
    assert installed is not None
    others = [release for release in RELEASES if release != installed.version]
    assert config_defaults.defaults(installed.version, "DPO", others) == config_defaults.defaults_of(installed)["DPO"]
    with pytest.raises(LookupError):
        config_defaults.defaults("99.0.0", "DPO", RELEASES)


def test_a_damaged_record_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "defaults.json"
    damaged.write_text('{"releases": []}')
    monkeypatch.setattr(config_defaults, "data_file", lambda name: damaged)
    config_defaults._record.cache_clear()
    try:
        with pytest.raises(DamagedError, match="install trl_hotfix again"):
            config_defaults.defaults("0.14.0", "GRPO", RELEASES)
    finally:
        config_defaults._record.cache_clear()
    assert data_file("defaults.json").is_file()
