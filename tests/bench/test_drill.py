from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import yaml

from trl_hotfix.catalogue import evidence_file
from trl_hotfix.catalogue.data_files import manifest
from trl_hotfix.model import Patch

from bench.releases import drill, layout, yaml_edits
from bench.results import evidence

NEWEST = layout.releases()[-1]
RELEASES = Path(layout.HERE, "releases.yaml")


def test_a_release_that_is_taken_out_and_added_again_leaves_the_file_as_it_was() -> None:
    text = RELEASES.read_text(encoding="utf-8")
    without = drill.without_release(text, NEWEST)
    assert NEWEST not in without
    assert yaml.safe_load(yaml_edits.with_release(without, layout.releases()[-2], NEWEST)).keys() == (
        yaml.safe_load(text).keys()
    )


def test_ranges_that_a_release_ended_are_open_again() -> None:
    text = manifest().read_text(encoding="utf-8")
    opened = drill.with_open_ranges(text, NEWEST)
    before, after = (
        {entry["id"]: msgspec.convert(entry, Patch) for entry in yaml.safe_load(one)} for one in (text, opened)
    )
    changed = [patch_id for patch_id, patch in before.items() if after[patch_id] != patch]
    assert changed == [patch_id for patch_id, patch in before.items() if patch.upstream.fixed_in == NEWEST]
    assert changed, f"no patch is fixed in {NEWEST}"
    for patch_id in changed:
        patch = after[patch_id]
        assert yaml_edits.is_open(patch.trl)
        assert patch.upstream.fixed_in is None
        assert patch.review_by is not None
        # What the judgement does when the self-tests say `fixed`.
        modules = frozenset(target.module for target in patch.targets)
        assert yaml_edits.ended(patch, NEWEST, modules) == before[patch_id]


def test_a_forgotten_release_is_nowhere_in_the_evidence(tmp_path: Path) -> None:
    files = evidence_file.paths(evidence.EVIDENCE)
    patch_id = next(file.stem for file in files if NEWEST in evidence_file.read(file)["releases"])
    shutil.copy(evidence.EVIDENCE / f"{patch_id}.json", tmp_path)
    drill.forget(NEWEST, tmp_path)
    record, before = (evidence_file.read(folder / f"{patch_id}.json") for folder in (tmp_path, evidence.EVIDENCE))
    assert record["releases"] == [release for release in before["releases"] if release != NEWEST]
    assert not [run for run in record["cells"] + record["proofs"] if NEWEST in (run["release"], run["ran"])]
    older = [cell for cell in before["cells"] if cell["release"] != NEWEST]
    assert [(cell["release"], cell["stack"], cell["verdict"], cell["key"]) for cell in record["cells"]] == [
        (cell["release"], cell["stack"], cell["verdict"], cell["key"]) for cell in older
    ]


LEDGER = """\
# The ledger.

# Steps.

- relation: padding
  trl: ">=1.16.0"
  new: begins

# Forms.

- relation: formats
  trl: ">=1.3.0,<1.16.0"
  new: ended
"""


def test_the_ledger_has_no_finding_that_begins_with_the_release_and_none_that_it_ended() -> None:
    left = drill.without_findings(LEDGER, "1.16.0")
    assert yaml.safe_load(left) == [{"relation": "formats", "trl": ">=1.3.0", "new": "ended"}]
    assert "# Steps.\n\n# Forms.\n" in left
    assert yaml.safe_load(drill.without_findings(LEDGER.partition("# Forms.")[0], "1.16.0")) == []


def test_what_a_release_has_answered_itself_is_not_shared(tmp_path: Path) -> None:
    older, newest = '{"ran": "1.15.0@tf4.57"}\n', '{"ran": "1.16.0@tf4.57"}\n'
    for name, lines in (("both", older + newest), ("newest", newest)):
        Path(tmp_path, f"{name}.jsonl").write_text(lines, encoding="utf-8")
    drill.share_answers("1.16.0", tmp_path, tmp_path / "shared")
    assert {file.name: file.read_text() for file in (tmp_path / "shared").iterdir()} == {"both.jsonl": older}
