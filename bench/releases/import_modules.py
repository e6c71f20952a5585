"""Run inside one release: import modules of TRL, and tell which of them fail.

python -m bench.releases.import_modules OUT.json MODULE...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trl_hotfix.verification import cells


def failures(modules: list[str]) -> dict[str, str]:
    """Return the error of each module that this TRL has and that cannot be imported."""
    errors = {}
    for name in modules:
        try:
            cells.imported(name)
        # The import of TRL may raise anything on a stack that it does not support; that is the finding.
        except Exception as error:  # noqa: BLE001
            errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    return errors


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(failures(sys.argv[2:])), encoding="utf-8")
