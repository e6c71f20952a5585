"""Virtual environments for the tests of start-up and packaging."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launched.environments import Environment, new_environment

CHECKOUT = Path(__file__).parents[2]


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
        "bench/proving/prove.py",
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
