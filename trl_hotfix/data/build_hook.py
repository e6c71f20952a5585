"""What hatchling calls when it builds a wheel: it makes the files of ``data/`` that a checkout does not have.

It checks the catalogue and writes it as JSON, condenses ``evidence/`` and packs the proofs.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install reads the evidence and the proofs of its checkout.
        if version == "editable" or self.target_name != "wheel":
            return
        root = Path(self.root)
        catalogue = root / "trl_hotfix" / "catalogue"
        records = _module(catalogue / "evidence_file.py").read_all(root / "evidence")
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for name, content in _module(catalogue / "condensed.py").files(records).items():
            # In the order of the evidence, in which `explain` has the numbers of a run.
            text = json.dumps(content, separators=(",", ":"))
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        _check_catalogue(root, folder)
        _pack_proofs(root, folder / "proofs.tar.bz2")
        for path in folder.iterdir():
            build_data["force_include"][str(path)] = f"trl_hotfix/data/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _check_catalogue(root: Path, folder: Path) -> None:
    """Write ``patches.json`` and ``known.json`` to ``folder``. A mistake in the catalogue stops the build.

    ``build-system.requires`` names msgspec and PyYAML for this. The build needs a parser of YAML in any case, and with
    both the package's own code can read and check the catalogue: the modules of the patches import neither torch nor
    TRL. So there is no second check here that reads the modules as text. A new process does it, because this one may
    have imported another trl_hotfix. ``-B`` keeps compiled files out of the source.
    """
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-B", "-m", "trl_hotfix.catalogue.shipped", str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise ValueError(f"the catalogue cannot be shipped: {process.stderr.strip()}")


def _pack_proofs(root: Path, archive: Path) -> None:
    """Pack what ``verify --full`` runs: the proofs of the patches, and what they have in common.

    Together they take half of what they take as files of the wheel, and nobody reads them there, so their comments
    stay out. Times and owners are a new ``TarInfo``'s.
    """
    tests = root / "tests"
    patches = root / "trl_hotfix" / "patches"
    of_patches = {path.relative_to(patches) for path in patches.glob("*/*.py")}
    proofs = [path for path in (tests / "proofs").glob("*/*.py") if path.relative_to(tests / "proofs") in of_patches]
    with tarfile.open(archive, "w:bz2", format=tarfile.USTAR_FORMAT) as packed:
        for path in [root / "bench" / "proving" / "prove.py", *sorted([*proofs, *(tests / "tiny").glob("*.py")])]:
            member = tarfile.TarInfo(path.relative_to(tests if tests in path.parents else root).as_posix())
            content = _without_comments(path.read_text(encoding="utf-8")).encode()
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))


def _without_comments(text: str) -> str:
    """Return a module without comments and docstrings. Each line keeps its number, which a traceback names.

    A class or function that has nothing else keeps its docstring.
    """
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column].rstrip()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            texts = [statement for statement in node.body if _is_text(statement)]
            for statement in texts if len(texts) < len(node.body) else ():
                last = statement.end_lineno or statement.lineno
                lines[statement.lineno - 1 : last] = [""] * (last - statement.lineno + 1)
    return "\n".join(lines)


def _is_text(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _module(path: Path) -> Any:
    # By its file: the package needs libraries that are not there while a wheel is built.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
