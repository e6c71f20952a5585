"""Any Python file can be scanned."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.scanning.hits import judge
from trl_hotfix.scanning.scripts import read


@pytest.mark.needs_trl
def test_every_python_file_is_scanned_without_an_error() -> None:
    files = _python_files()
    assert len(files) > 50
    patches = loading.load()
    trainers = [judge(call, patches, "0.11.4") for file in files for call in read(file).calls]
    assert {trainer.call.name for trainer in trainers} >= {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward"}


def _python_files() -> list[Path]:
    """The modules of TRL, the Trainer of transformers, and the tests of the scan."""
    trl, transformers = (find_spec(name) for name in ("trl", "transformers"))
    assert transformers is not None
    assert transformers.origin is not None
    files = list(Path(trl.origin).parent.rglob("*.py")) if trl is not None and trl.origin else []
    return [*files, Path(transformers.origin).with_name("trainer.py"), *Path(__file__).parent.rglob("*.py")]
