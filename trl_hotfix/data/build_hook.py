"""What hatchling calls when it builds a wheel: ``data/*.json`` from ``evidence/``, and the evidence of each patch."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install reads the evidence of its checkout.
        if version == "editable" or self.target_name != "wheel":
            return
        root = Path(self.root)
        condensed = _module(root / "trl_hotfix" / "catalogue" / "condensed.py")
        records = condensed.read(root / "evidence")
        self._folder = tempfile.TemporaryDirectory()
        for name, content in condensed.condensed(records).items():
            path = Path(self._folder.name, name)
            path.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True), encoding="utf-8")
            build_data["force_include"][str(path)] = f"trl_hotfix/data/{name}"
        for record in records:
            name = f"{record['patch']}.json"
            build_data["force_include"][str(root / "evidence" / name)] = f"trl_hotfix/evidence/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _module(path: Path) -> Any:
    # By its file: the package needs libraries that are not there while a wheel is built.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
