"""The Dockerfile of docs/platform.md: its lines run in order in a clean environment. A bad policy fails the build."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trl_hotfix.catalogue import loading

if TYPE_CHECKING:
    from launched.environments import Environment

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "platform.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```dockerfile\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if not line.startswith("#")
]
CLONE = ("trl_hotfix", "evidence", "tests/proofs", "tests/tiny", "bench/proving/prove.py", "patches.yaml", "known.yaml")


@dataclass
class Image:
    """A folder as the root of an image, and a Python in it. It knows COPY, ENV and RUN."""

    root: Path
    context: Path
    python: Environment
    variables: dict[str, str] = field(default_factory=dict)

    def build(self, lines: Iterable[str]) -> subprocess.CompletedProcess[str]:
        """Follow the lines, up to the first that fails. Return the last command that ran."""
        process: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], 0)
        for line in lines:
            instruction, rest = self._inside(line).split(" ", 1)
            if instruction == "COPY":
                self._copy(*rest.split())
            elif instruction == "ENV":
                self.variables |= dict(word.split("=", 1) for word in shlex.split(rest))
            else:
                assert instruction == "RUN"
                process = self._run(rest)
            if process.returncode:
                break
        return process

    def _inside(self, line: str) -> str:
        return re.sub(r"(?<![\w/.])/(?=opt/|etc/)", f"{self.root}/", line)

    def _copy(self, source: str, target: str) -> None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (self.context / source).is_dir() else shutil.copy
        copy(self.context / source, target)

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        # Nothing comes from the network here: the environment sees what trl_hotfix needs, and TRL.
        offline = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
        path = os.pathsep.join([str(self.python.folder / "bin"), "/usr/bin", "/bin"])
        variables = {"PATH": path, "HOME": str(self.root), "DS_ACCELERATOR": "cpu", **offline, **self.variables}
        return subprocess.run(
            ["sh", "-c", command], cwd=self.root, env=variables, capture_output=True, text=True, check=False
        )


def policy(trl: str, environment: Environment) -> dict[str, Any]:
    written = environment.run("-m", "trl_hotfix", "freeze", "--trl", trl, PYTHONPATH=str(CHECKOUT))
    content: dict[str, Any] = json.loads(written.stdout)
    return content


@pytest.fixture(scope="module")
def image(
    tmp_path_factory: pytest.TempPathFactory, new_venv: Callable[[Path], Environment]
) -> tuple[Image, subprocess.CompletedProcess[str]]:
    """Return an image that was built from the page, with a policy for its TRL, and the last command of the build."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "root").mkdir()
    for name in (*CLONE, "pyproject.toml", "README.md", "LICENSE"):
        target = folder / "context" / "trl_hotfix" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = CHECKOUT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    built = Image(folder / "root", folder / "context", new_venv(folder / "root" / "venv"))
    (folder / "context" / "policy.json").write_text(json.dumps(policy("0.11.4", built.python)))
    return built, built.build(LINES)


def again(image: Image, content: str) -> subprocess.CompletedProcess[str]:
    """Build once more with another policy, with the layers of the installation from before."""
    (image.context / "policy.json").write_text(content)
    return image.build(line for line in LINES if "pip install" not in line and not line.startswith("COPY trl_hotfix"))


def test_the_build_ends_with_a_check_of_the_policy(image: tuple[Image, subprocess.CompletedProcess[str]]) -> None:
    built, last = image
    assert last.returncode == 0, last.stdout + last.stderr
    assert "no problem found" in last.stdout
    assert "TRL_HOTFIX_ONLY=@~/etc/trl_hotfix/policy.json" in last.stdout
    content = json.loads((built.context / "policy.json").read_text())
    assert f"{len(content['patches'])} patches apply here, digest " in last.stdout
    assert "trl_hotfix    0.2.0 in ~/venv/lib/" in last.stdout


def edited() -> dict[str, str]:
    first = loading.load()[0]
    entry = {"id": first.id, "revision": first.revision + 1, "options": {}}
    return {
        "{": "cannot be used: ",
        json.dumps({"patches": [{**entry, "id": "nobodys-patch"}]}): "unknown patch 'nobodys-patch'",
        json.dumps({"patches": [entry]}): "entry 1: ",
        json.dumps({"patches": [], "trl": "0.11.4", "digest": "0" * 16}): "it was changed by hand",
    }


@pytest.mark.parametrize(("content", "expected"), edited().items())
def test_a_bad_policy_fails_the_build_with_one_error(
    image: tuple[Image, subprocess.CompletedProcess[str]], content: str, expected: str
) -> None:
    built, _ = image
    last = again(built, content)
    assert last.returncode == 2
    assert last.stdout.count("PROBLEM ") == 1
    problem, _, _ = last.stdout.partition("\n   -> ")
    assert problem.startswith("PROBLEM  TRL_HOTFIX_ONLY=@")
    assert "policy.json" in problem
    assert expected in " ".join(problem.split())
    # The last line of the build's log has it too.
    assert last.stderr.startswith("trl-hotfix: the freeze file ")
    assert expected in last.stderr
    assert "Traceback" not in last.stderr


def test_a_policy_for_another_trl_fails_the_build(image: tuple[Image, subprocess.CompletedProcess[str]]) -> None:
    built, _ = image
    last = again(built, json.dumps(policy("1.9.0", built.python)))
    assert last.returncode == 1
    assert last.stdout.startswith("PROBLEM  you named what cannot be on here: ")
