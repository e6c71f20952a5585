"""The record of the defaults of TRL's configs is that of the releases, and a new release is added to it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from trl_hotfix.catalogue.data_files import data_file
from trl_hotfix.matching import config_defaults

from bench.releases import layout
from tools import config_defaults_record

TEXT = data_file("defaults.json").read_text(encoding="utf-8")


def test_a_new_release_is_added_from_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = layout.releases()[-1]
    monkeypatch.setattr(layout, "releases", lambda: (newest, "99.0.0"))
    monkeypatch.setattr(config_defaults_record, "_defaults", lambda release: {"DPO": {"beta": "7.0"}})
    record = msgspec.json.decode(config_defaults_record.with_release(TEXT, "99.0.0"), type=config_defaults.Record)
    assert record["releases"]["DPO"][-2:] == [newest, "99.0.0"]
    assert record["changes"]["DPO"]["beta"][-1] == ("99.0.0", "7.0")
    assert record["changes"]["DPO"]["max_length"][-1] == ("99.0.0", None)
    assert record["changes"]["SFT"] == msgspec.json.decode(TEXT, type=config_defaults.Record)["changes"]["SFT"]


def test_a_release_that_is_on_record_changes_nothing() -> None:
    assert config_defaults_record.with_release(TEXT, layout.releases()[-1]) == TEXT


def test_a_release_that_is_not_the_newest_needs_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "releases", lambda: ("0.9.7", "99.0.0"))
    monkeypatch.setattr(config_defaults_record, "_defaults", lambda release: {"DPO": {"beta": release}})
    record = msgspec.json.decode(config_defaults_record.with_release(TEXT, "0.9.7"), type=config_defaults.Record)
    assert record["releases"] == {"DPO": ["0.9.7", "99.0.0"]}


@pytest.mark.matrix
def test_the_record_is_that_of_all_releases() -> None:
    layout.build_release_overlays(Path(sys.executable))
    assert config_defaults_record.of_all_releases() == TEXT, "python -m tools.config_defaults_record writes it"
