"""Virtual environments for the tests of start-up and packaging."""

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
# Test files import `layout` and `sharing` of the bench by name, and tables of this folder.
sys.path[:0] = [str(CHECKOUT / "tests" / "bench"), str(Path(__file__).parent)]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of the one that runs the tests, but not its trl_hotfix."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"

    def install(self, *requirements: str, installer: str = "uv") -> None:
        self._installer(installer, "install", "--no-deps", *requirements)

    def uninstall(self, installer: str = "uv") -> None:
        self._installer(installer, "uninstall", *([] if installer == "uv" else ["-y"]), "trl-hotfix")

    def _installer(self, installer: str, *arguments: str) -> None:
        if installer == "uv":
            command = ["-m", "uv", "--quiet", "pip", arguments[0], "--python", self.python, *arguments[1:]]
        else:
            command = ["-m", "pip", "--quiet", "--python", self.python, *arguments]
        subprocess.run([sys.executable, *command], check=True, env={**os.environ, "UV_LINK_MODE": "copy"})

    def run(self, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python. Only ``variables`` configure trl_hotfix or extend the import path."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRL_HOTFIX", "PYTHONPATH"))}
        return subprocess.run(
            [self.python, *arguments],
            # DeepSpeed prints the accelerator that it found to standard output, unless the variable names one.
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
    # A path line adds no site directory: the .pth files in it, an editable trl_hotfix among them, do not run.
    (environment.packages / "stack.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture(scope="session")
def new_venv() -> Callable[[Path], Environment]:
    """Return a function that makes an environment without trl_hotfix in a folder."""
    return new_environment


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Path]]:
    """Return a function that builds the sdist of a checkout, and from it the wheel; with ``--wheel`` that alone."""

    def built(checkout: Path, *options: str, **variables: str) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("dist")
        command = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(folder), *options, str(checkout)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **variables})
        kinds = {".whl": "wheel", ".gz": "sdist"}
        return {kinds[path.suffix]: path for path in folder.iterdir() if path.suffix in kinds}

    return built


@pytest.fixture(scope="session")
def distributions(build: Callable[..., dict[str, Path]]) -> dict[str, Path]:
    return build(CHECKOUT)


@pytest.fixture(scope="session")
def make_environment(
    distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Environment]:
    """Return a factory of environments with the wheel, for a module that shares one and changes it."""

    def make() -> Environment:
        environment = new_environment(tmp_path_factory.mktemp("made") / "venv")
        environment.install(str(distributions["wheel"]))
        return environment

    return make


@pytest.fixture(scope="session")
def installed(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return the shared environment with the wheel. A test that changes it takes ``own`` instead."""
    environment = new_environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(str(distributions["wheel"]))
    return environment


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return the shared environment with the checkout. No test changes it."""
    environment = new_environment(tmp_path_factory.mktemp("editable") / "venv")
    environment.install("-e", str(CHECKOUT))
    return environment


@pytest.fixture(scope="session")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment that starts the checkout by the ``.pth`` line, and has a TRL 0.11.4 without trainers."""
    environment = new_environment(tmp_path_factory.mktemp("stubbed") / "venv")
    packages, metadata = environment.packages, environment.packages / "trl-0.11.4.dist-info"
    (packages / "checkout.pth").write_text(f"{CHECKOUT}\n")
    shutil.copy(CHECKOUT / "trl_hotfix" / "trl_hotfix_autoapply.pth", packages)
    (packages / "trl").mkdir()
    (packages / "trl" / "__init__.py").write_text('__version__ = "0.11.4"\n')
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.11.4\n")
    return environment


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """Return an environment without trl_hotfix."""
    return new_environment(tmp_path / "venv")


@pytest.fixture
def own(bare: Environment, distributions: dict[str, Path]) -> Environment:
    """Return an environment with the wheel that the test may break."""
    bare.install(str(distributions["wheel"]))
    return bare


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the checkout, for editable installs and broken catalogues."""
    copy = tmp_path / "checkout"
    parts = (
        "trl_hotfix",
        "evidence",
        "tests/proofs",
        "tests/tiny",
        "tests/bench/prove.py",
        "patches.yaml",
        "known.yaml",
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
