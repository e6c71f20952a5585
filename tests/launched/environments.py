"""Virtual environments for tests: they see the packages of the one that runs the tests, but not its trl_hotfix."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


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
