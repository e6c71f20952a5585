"""Freeze files of 0.1.0 are read, and what changed since is refused by name, as the changelog says.

``freeze.json`` was written by 0.1.0 for TRL 0.11.4; ``all_patches.json`` has every patch of its catalogue, with its
revision and the defaults of its options.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.errors import SettingError
from trl_hotfix.selection import freeze_files
from trl_hotfix.selection.set_digest import digest_of

HERE = Path(__file__).parent / "of_0_1_0"
CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"
KNOWN = {patch.id: patch for patch in loading.load()}


def content(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((HERE / name).read_text(encoding="utf-8"))
    return read


def changed(name: str) -> set[str]:
    """Return the patches of a file whose revision is another one by now."""
    return {entry["id"] for entry in content(name)["patches"] if entry["revision"] != KNOWN[entry["id"]].revision}


def test_each_file_is_read() -> None:
    for name in ("freeze.json", "all_patches.json"):
        frozen = freeze_files.load(str(HERE / name))
        assert (frozen.schema, frozen.trl_hotfix) == (1, "0.1.0")
        assert len(frozen.patches) == len(content(name)["patches"]) > 0
        assert freeze_files.record(content(name)) is not None, "a run that resumes from it is compared with it"


def test_what_is_the_same_can_be_applied(tmp_path: Path) -> None:
    for name in ("freeze.json", "all_patches.json"):
        kept = [entry for entry in content(name)["patches"] if entry["id"] not in changed(name)]
        path = tmp_path / name
        path.write_text(json.dumps({**content(name), "patches": kept, "digest": digest_of(content(name)["trl"], kept)}))
        assert [entry.id for entry in freeze_files.read(str(path), KNOWN).patches] == [entry["id"] for entry in kept]


def test_each_patch_that_changed_is_refused_by_name(tmp_path: Path) -> None:
    refused = {}
    for entry in content("all_patches.json")["patches"]:
        path = tmp_path / "one.json"
        path.write_text(json.dumps({"trl_hotfix": "0.1.0", "patches": [entry]}))
        try:
            freeze_files.read(str(path), KNOWN)
        except SettingError as error:
            refused[entry["id"]] = str(error)
    assert refused.keys() == changed("all_patches.json")
    for patch_id, message in refused.items():
        assert f"{patch_id} is revision 1 there, {KNOWN[patch_id].revision} in this trl_hotfix" in message


def test_the_changelog_names_exactly_what_changed() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    note = text.partition("### Upgrading from 0.1.0")[2].partition("revision:")[2].partition("\n- ")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", note)) == changed("all_patches.json")
