"""Bodies are read from the files of a release, without importing it."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from trl_hotfix.errors import NotATrlError
from trl_hotfix.matching import digests
from trl_hotfix.matching.sources import Release

FILES = {
    "trl-1.2.0.dist-info/METADATA": "",
    "trl/__init__.py": "",
    "trl/trainer/__init__.py": "from .base import helper\n",
    "trl/trainer/base.py": "class Base:\n    def step(self):\n        return 1\n\ndef helper():\n    return 2\n",
    "trl/trainer/made_up.py": '''\
from .base import Base

class Trainer(Base):
    def loss(self):
        """Docstring."""
        return 3  # comment
''',
}
STEP = "def step(self):\n    return 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest_of(text: str) -> str:
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    return digests.digest(definition)


def test_a_release_lists_its_modules_and_attributes(folder: Path) -> None:
    release = Release(folder)
    assert release.version == "1.2.0"
    assert sorted(release.modules()) == ["trl", "trl.trainer", "trl.trainer.base", "trl.trainer.made_up"]
    assert release.attributes("trl.trainer.base") == ["helper", "Base.step"]


def test_inherited_and_imported_names_are_followed(folder: Path) -> None:
    release = Release(folder)
    assert release.body("trl.trainer.made_up", "Trainer.step") == digest_of(STEP)
    assert release.body("trl.trainer", "helper") == release.body("trl.trainer.base", "helper") is not None


def test_an_absent_name_has_no_body(folder: Path) -> None:
    release = Release(folder)
    for module, attribute in (("trl.trainer.made_up", "Trainer.gone"), ("trl.gone", "helper"), ("trl", "helper")):
        assert release.body(module, attribute) is None
        assert release.text(module, attribute) is None


def test_the_text_has_no_comment_and_no_docstring(folder: Path) -> None:
    assert Release(folder).text("trl.trainer.made_up", "Trainer.loss") == "def loss(self):\n    return 3"


def test_a_wheel_has_the_bodies_of_its_folder(folder: Path) -> None:
    wheel = folder / "trl-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    assert Release(wheel).body("trl.trainer.made_up", "Trainer.step") == digest_of(STEP)


def test_what_is_no_release_of_trl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("text")
    for path, message in ((tmp_path, "is not a wheel of TRL"), (tmp_path / "text.whl", "is not a wheel")):
        with pytest.raises(NotATrlError, match=message):
            Release(path)
