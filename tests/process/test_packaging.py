"""The wheel owns the start-up hook: it works in every kind of install, and uninstalling removes it."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sharing

from trl_hotfix.catalogue import condensed, loading

if TYPE_CHECKING:
    from conftest import Environment

FIRES = "import sys; print('trl_hotfix.autostart' in sys.modules)"


def test_the_wheel_has_the_hook_at_its_root(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = wheel.namelist()
        record = wheel.read(next(name for name in names if name.endswith("/RECORD"))).decode()
    outside = {name for name in names if not name.startswith(("trl_hotfix/", "trl_hotfix-"))}
    assert outside == {"trl_hotfix_autoapply.pth"}
    data = {
        "patches.yaml",
        "known.yaml",
        "data/defaults.json",
        "data/fingerprints.json",
        "data/proven.json",
        "py.typed",
    }
    data |= {f"evidence/{patch.id}.json" for patch in loading.load()}
    assert {f"trl_hotfix/{name}" for name in data} <= set(names)
    assert not any(name.endswith("build_hook.py") for name in names)
    assert "trl_hotfix_autoapply.pth,sha256=" in record


def test_the_wheel_has_what_the_evidence_says(distributions: dict[str, Path], checkout: Path) -> None:
    files = condensed.condensed(condensed.read(checkout / "evidence"))
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        assert {name: json.loads(wheel.read(f"trl_hotfix/data/{name}")) for name in files} == files


def test_the_sdist_builds_the_wheel_and_has_the_tests(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "patches.yaml",
        "known.yaml",
        "trl_hotfix/trl_hotfix_autoapply.pth",
        "LICENSE",
        "tests/process/test_packaging.py",
    } <= names


def test_the_hook_is_one_short_line_without_exec() -> None:
    line = (Path(__file__).parents[2] / "trl_hotfix" / "trl_hotfix_autoapply.pth").read_text()
    assert line.count("\n") == 1
    assert len(line) < 130
    assert "exec" not in line


def test_pth_import_lines_still_run_in_this_python() -> None:
    # Python 3.18 ignores them silently (PEP 829): from then on a `.start` file is needed; before, it only costs time.
    assert sys.version_info < (3, 18)


INSTALLS = [(kind, installer) for kind in ("wheel", "sdist", "editable") for installer in ("pip", "uv")]


@pytest.mark.parametrize(("kind", "installer"), sharing.heavy(INSTALLS, smoke=[("wheel", "pip"), ("editable", "uv")]))
def test_every_install_fires_and_uninstalls_cleanly(
    kind: str, installer: str, bare: Environment, distributions: dict[str, Path], checkout: Path
) -> None:
    before = sorted(bare.packages.iterdir())
    requirements = ["-e", str(checkout)] if kind == "editable" else [str(distributions[kind])]
    bare.install(*requirements, installer=installer)
    assert bare.code(FIRES, TRL_HOTFIX="1").stdout == "True\n"
    assert bare.code(FIRES).stdout == "False\n"
    listed = bare.run("-m", "trl_hotfix", "--list")
    assert "moe-aux-loss-lost-under-deepspeed" in listed.stdout, listed.stderr
    assert "TRL_HOTFIX=1 works here" in listed.stdout
    assert "proven on 0." in listed.stdout
    bare.uninstall(installer)
    assert sorted(path for path in bare.packages.iterdir() if path.name != "__pycache__") == before


def test_the_list_reports_that_pip_target_cannot_work(
    bare: Environment, distributions: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    bare.install("--target", str(target), str(distributions["wheel"]))
    listed = bare.run("-m", "trl_hotfix", "--list", PYTHONPATH=str(target), TRL_HOTFIX="1")
    assert "TRL_HOTFIX=1 does nothing here: trl_hotfix_autoapply.pth is in no site directory" in listed.stdout
