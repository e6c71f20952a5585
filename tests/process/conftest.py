"""Environments of their own for everything about start-up and packaging."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of the one that the tests run in, but not its trl_hotfix."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"

    def install(self, *what: str, installer: str = "uv") -> None:
        self._installer(installer, "install", "--no-deps", *what)

    def uninstall(self, installer: str = "uv") -> None:
        self._installer(installer, "uninstall", *([] if installer == "uv" else ["-y"]), "trl-hotfix")

    def _installer(self, installer: str, *arguments: str) -> None:
        if installer == "uv":
            command = ["-m", "uv", "--quiet", "pip", arguments[0], "--python", self.python, *arguments[1:]]
        else:
            command = ["-m", "pip", "--quiet", "--python", self.python, *arguments]
        subprocess.run([sys.executable, *command], check=True, env={**os.environ, "UV_LINK_MODE": "copy"})

    def run(self, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python; only the variables given here name trl_hotfix or add to its path."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRL_HOTFIX", "PYTHONPATH"))}
        return subprocess.run(
            [self.python, *arguments],
            # DeepSpeed says on standard output which accelerator it found, unless it is told.
            env={**kept, "DS_ACCELERATOR": "cpu", **variables},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def code(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("-c", code, cwd=None, **variables)


def new_environment(folder: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    environment = Environment(folder)
    # A path line is no site directory: the .pth files over there, an editable trl_hotfix among them, do not run.
    (environment.packages / "stack.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built from a copy of the checkout; the wheel goes through the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(folder), str(CHECKOUT)],
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="session")
def make_environment(
    distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Environment]:
    """For a module that shares an environment of its own, with the wheel, which it may change."""

    def make() -> Environment:
        environment = new_environment(tmp_path_factory.mktemp("made") / "venv")
        environment.install(str(distributions["wheel"]))
        return environment

    return make


@pytest.fixture(scope="session")
def installed(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel. Shared: a test that changes it takes ``own`` instead."""
    environment = new_environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(str(distributions["wheel"]))
    return environment


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """An environment without trl_hotfix."""
    return new_environment(tmp_path / "venv")


@pytest.fixture
def own(bare: Environment, distributions: dict[str, Path]) -> Environment:
    """An environment with the wheel that the test may break."""
    bare.install(str(distributions["wheel"]))
    return bare


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, for editable installs and broken catalogues."""
    copy = tmp_path / "checkout"
    parts = (
        "trl_hotfix",
        "evidence",
        "tests/proofs",
        "tests/tiny",
        "tests/bench/prove.py",
        "patches.yaml",
        "pyproject.toml",
    )
    for name in (*parts, "README.md", "LICENSE"):
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy / name)
    return copy
