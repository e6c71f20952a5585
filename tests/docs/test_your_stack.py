"""The page "your stack": its tables have what the catalogue says, and its script decides as `audit` does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from trl_hotfix.matching.fingerprints import bodies

from tools.pages import your_stack

DOCS = Path(__file__).parents[2] / "docs"
OF_LAYERS = {
    "transformers": ("4.45.2", "4.46.0", "4.57.6", "5.0.0rc1", "5.0.0", "5.3.0", "5.23.0"),
    "deepspeed": ("0.15.1", "0.15.2", "0.18.3", "0.18.4", "0.19.0+cu128"),
    "accelerate": ("1.6.0", "1.14.0", "1.15.0.dev0", "1.15.0"),
    "peft": ("0.7.1", "0.18.0"),
}


def stacks() -> list[tuple[str, dict[str, str]]]:
    """Return every release with each version of one layer, beside the stacks of the page."""
    others = {"transformers": "4.57.6", "accelerate": "1.12.0", "peft": "0.18.0", "deepspeed": "0.18.9"}
    found = [(release, your_stack._versions(stack)) for release, stack in your_stack.EXAMPLES]
    for release in bodies().releases:
        found += [(release, {**others, name: version}) for name, versions in OF_LAYERS.items() for version in versions]
    return [*found, ("1.0.0rc1", {}), ("1.16.0", {"transformers": "5.23.0"})]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_the_script_finds_the_bugs_that_audit_finds() -> None:
    asked = [{"trl": release, **versions} for release, versions in stacks()]
    script = f"""
        const {{ parsed, has }} = require({json.dumps(str(DOCS / "your-stack.js"))});
        const {{ bugs, asked }} = JSON.parse(require("fs").readFileSync(0));
        console.log(JSON.stringify(asked.map((stack) => {{
          const versions = Object.fromEntries(Object.entries(stack).map(([name, text]) => [name, parsed(text)]));
          return bugs.filter((bug) => has(bug, versions)).map((bug) => bug.id).sort();
        }})));
    """
    given = json.dumps({"bugs": your_stack.data("/")["bugs"], "asked": asked})
    answer = subprocess.run(["node", "-e", script], input=given, capture_output=True, text=True, check=True)
    expected = [sorted(bug.id for bug in your_stack.present(release, versions)) for release, versions in stacks()]
    assert json.loads(answer.stdout) == expected


def test_a_bug_of_a_layer_is_in_the_rows_of_the_stacks_that_have_it() -> None:
    rows = [line for line in your_stack.page(directory_urls=True).splitlines() if line.startswith("| ")]
    (old,) = (row for row in rows if row.startswith("| 1.7.1 "))
    (new,) = (row for row in rows if row.startswith("| 1.16.0 "))
    assert "bugs/transformers-divides-gradients-twice.md" in old
    assert "bugs/transformers-divides-gradients-twice.md" not in new
    assert "bugs/resume-leaves-tensors-unrestored.md" in new


def test_every_package_of_the_form_has_versions_that_we_checked() -> None:
    for package in your_stack.data("/")["packages"][1:]:
        assert your_stack._checked(package), package
