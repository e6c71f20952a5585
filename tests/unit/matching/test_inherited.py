"""The bodies in transformers on record, and what the files of TRL inherit from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_hotfix.catalogue.data_files import data_file
from trl_hotfix.matching import inherited
from trl_hotfix.matching.sources import Release
from trl_hotfix.model import Target

TEXT = "class Trainer:\n    def step(self):\n        return {}\n"
OTHERS = {"trainer_callback.py": "", "training_args.py": ""}


def bodies(result: int) -> dict[str, str]:
    return inherited.read({"trainer.py": TEXT.format(result), **OTHERS})


BY_RELEASE = {"5.10.0": {}, "5.2.0": bodies(1), "5.3.0": bodies(1), "5.9.0": bodies(2)}


def test_a_record_has_the_changes_in_the_order_of_the_releases() -> None:
    record = inherited.recorded(BY_RELEASE)
    (first,), (second,) = bodies(1).values(), bodies(2).values()
    assert record["releases"] == ["5.2.0", "5.3.0", "5.9.0", "5.10.0"]
    assert record["bodies"] == {"Trainer.step": [("5.2.0", first), ("5.9.0", second), ("5.10.0", None)]}
    assert inherited.by_release(record) == BY_RELEASE


def test_what_is_on_record_is_told_and_nothing_in_between() -> None:
    name = "transformers:Trainer.training_step"
    assert inherited.body_of(name, "5.2.0") == inherited.body_of(name, "5.5.3") is not None
    assert inherited.body_of(name, "5.2.0") != inherited.body_of(name, "5.23.0")
    assert [inherited.body_of(name, version) for version in ("5.2.7", None)] == [None, None]
    assert inherited.body_of("torch:Module.forward", "5.2.0") is None
    assert inherited.body_of("transformers:Trainer.gone", "5.2.0") is None
    assert len(inherited.bodies_of(name)) > 5
    assert inherited.bodies_of("transformers:Trainer.gone") == set()


def test_the_file_is_written_as_it_was_read() -> None:
    text = data_file("transformers.json").read_text(encoding="utf-8")
    assert inherited.as_text(inherited.recorded(inherited.by_release(inherited._record()))) == text


@pytest.fixture
def release(tmp_path: Path) -> Release:
    files = {
        "trl-1.2.0.dist-info/METADATA": "",
        "trl/__init__.py": "",
        "trl/base.py": "from transformers import Trainer\n\nclass Base(Trainer):\n    def own(self):\n        pass\n",
        "trl/x.py": "from .base import Base as _Base\n\nclass XTrainer(_Base):\n    pass\n\nclass Plain:\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Release(tmp_path)


@pytest.mark.parametrize(
    ("attribute", "base"),
    [
        ("XTrainer.training_step", "transformers:Trainer.training_step"),
        ("XTrainer.own", None),
        ("Plain.training_step", None),
        ("GoneTrainer.training_step", None),
        ("function", None),
    ],
)
def test_files_tell_what_a_class_inherits(release: Release, attribute: str, base: str | None) -> None:
    assert release.inherits("trl.x", attribute) == base


def test_the_body_of_a_target_is_trls_own_or_that_of_transformers(release: Release) -> None:
    step, own = (Target("trl.x", f"XTrainer.{name}", "wrapper") for name in ("training_step", "own"))
    assert inherited.body_in(release, step, "5.2.0") == inherited.body_of("transformers:Trainer.training_step", "5.2.0")
    assert inherited.body_in(release, step, "5.2.7") is None
    assert inherited.body_in(release, own, None) == release.body("trl.x", "XTrainer.own")
