"""Packs of third parties: loaded only if named, only files of their distribution, always reported by name."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from hypothesis import example, given
from hypothesis import strategies as st
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.catalogue import loading, packs
from trl_hotfix.errors import CatalogueError, DamagedError, PackError, SettingError
from trl_hotfix.matching import digests, fingerprints
from trl_hotfix.model import State
from trl_hotfix.patching import engine
from trl_hotfix.patching.wrappers import reference_of

from helpers.command_line import CHECKOUT, run

ID = "acme/marks-loss"
Install = Callable[..., Path]
PACK = Path(__file__).parents[2] / "acme_fixes"
ENTRY = (PACK / "patches.yaml").read_text()
MODULE = (PACK / "patches" / "marks_loss.py").read_text()
BODY = digests.loaded(DPOTrainer.dpo_loss).digest
BODIES = {
    "releases": ["0.11.4"],
    "targets": {
        "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss": {
            BODY: {"releases": ["0.11.4"], "is": {"marks-loss": "buggy", "moe-aux-loss-lost-under-deepspeed": "buggy"}}
        }
    },
}
FILES = {
    "__init__.py": "",
    "patches.yaml": ENTRY,
    "patches/__init__.py": "",
    "patches/marks_loss.py": MODULE,
    "fingerprints.json": json.dumps(BODIES),
}


def forget() -> None:
    """Clear what this process has cached of packs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_fixes"]:
        del sys.modules[name]
    for cache in (packs.find, loading.of_pack, fingerprints._of_pack):
        cache.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine) -> Any:
    """Install a distribution with a pack: its files, RECORD and entry point."""
    forget()
    monkeypatch.syspath_prepend(str(tmp_path))

    def install_pack(
        entry: str = "acme = acme_fixes",
        distribution: str = "acme-fixes",
        recorded: list[str] | None = None,
        files: Mapping[str, str | None] | None = None,
    ) -> Path:
        package = tmp_path / "acme_fixes"
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        texts = {package / name: text for name, text in {**FILES, **(files or {})}.items() if text is not None}
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n"
        texts |= {info / "METADATA": metadata, info / "entry_points.txt": f"[{packs.GROUP}]\n{entry}\n"}
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        names = [str(path.relative_to(tmp_path)) for path in texts] if recorded is None else recorded
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
        return package

    yield install_pack
    engine.ENGINE.revert(())
    forget()


def test_a_named_pack_is_applied_reported_and_reverted(install: Install) -> None:
    install()
    before = dict(vars(DPOTrainer))
    without = trl_hotfix.apply()
    report = trl_hotfix.apply(packs=["acme"])
    assert DPOTrainer.dpo_loss(object.__new__(DPOTrainer)) == "patched"
    assert report[ID].state is State.APPLIED
    assert report.packs == {"acme": "acme-fixes==1.2"}
    assert report.digest != without.digest
    assert ID in str(report)
    assert ID in trl_hotfix.explain(ID)
    assert all(ID in line for line in engine.ENGINE.journal(ID))
    assert report.to_dict()["packs"] == {"acme": "acme-fixes==1.2"}
    trl_hotfix.revert(ID)
    trl_hotfix.apply(only=[])
    assert dict(vars(DPOTrainer)) == before


def test_an_unnamed_pack_is_neither_imported_nor_known(install: Install) -> None:
    install(files={"__init__.py": "raise RuntimeError('imported')"})
    report = trl_hotfix.apply()
    assert ID not in [status.id for status in report]
    assert "packs" not in report.to_dict()
    assert "packs" not in report.freeze()
    assert not [name for name in sys.modules if name.startswith("acme_fixes")]
    with pytest.raises(trl_hotfix.UnknownPatchError):
        trl_hotfix.apply(only=[ID])


def test_an_argument_overrides_the_packs_variable(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("TRL_HOTFIX_PACKS", " acme ,")
    assert trl_hotfix.apply(only=[ID])[ID].state is State.APPLIED
    assert not [status for status in trl_hotfix.apply(packs=()) if status.id == ID]
    assert reference_of(vars(DPOTrainer)["dpo_loss"]) is None


def test_a_displaced_pack_is_still_reported_when_dropped(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    trl_hotfix.apply(packs=["acme"])
    installed = vars(DPOTrainer)["dpo_loss"]
    DPOTrainer.dpo_loss = lambda self: "somebody else's"
    try:
        assert trl_hotfix.apply(packs=[])[ID].state is State.DISPLACED
    finally:
        DPOTrainer.dpo_loss = installed
    assert trl_hotfix.revert(ID)


def test_patched_knows_the_named_packs(install: Install) -> None:
    install()
    trl_hotfix.apply(packs=["acme"], only=[])
    with trl_hotfix.patched(ID) as report:
        assert report[ID].state is State.APPLIED
    assert trl_hotfix.status()[ID].state is State.DISABLED


def test_an_unknown_body_without_fingerprints_is_skipped(install: Install) -> None:
    install(files={"fingerprints.json": None})
    status = trl_hotfix.apply(packs="acme")[ID]
    assert (status.state.value, status.reason.value) == ("skipped", "unknown-body")
    trl_hotfix.revert()
    assert trl_hotfix.apply(packs="acme", unknown_body="try")[ID].state is State.APPLIED


def test_fingerprints_of_a_pack_ignore_shipped_patches(install: Install) -> None:
    install()
    trl_hotfix.apply(packs="acme")
    shipped = "moe-aux-loss-lost-under-deepspeed"
    target = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"
    assert fingerprints.bodies_for(ID).verdict(ID, target, BODY) == "buggy"
    assert fingerprints.bodies_for(ID).verdict(shipped, target, BODY) is None
    assert fingerprints.bodies_for(shipped).verdict(shipped, target, BODY) is None


def test_damaged_fingerprints_name_their_pack(install: Install) -> None:
    install(files={"fingerprints.json": "[]"})
    status = trl_hotfix.apply(packs="acme")[ID]
    assert status.state is State.FAILED
    assert "install acme-fixes==1.2 again" in str(status.evidence)
    with pytest.raises(DamagedError):
        fingerprints.bodies_for(ID)


def refused(message: str, error: type[Exception] = PackError) -> None:
    before, path = dict(vars(DPOTrainer)), list(sys.meta_path)
    with pytest.raises(error, match=message):
        trl_hotfix.apply(packs=["acme"])
    assert dict(vars(DPOTrainer)) == before
    assert sys.meta_path == path
    assert engine.ENGINE._configuration.selection is None


# What is refused


def test_an_unknown_pack_gets_a_suggestion(install: Install) -> None:
    install(entry="acmes = acme_fixes")
    refused(r"no pack 'acme' is installed \(there is: acmes\); did you mean 'acmes'\?")


@pytest.mark.parametrize(
    "value",
    ["acme_fixes:patches", "acme_fixes.patches", "acme_fixes [extra]", "../acme_fixes", "http://x/y", "a b", "é"],
)
def test_an_entry_point_names_only_a_package(value: str, install: Install) -> None:
    install(entry=f"acme = {value}")
    refused("the pack 'acme' of acme-fixes names .*, expected a package and no more")


@pytest.mark.parametrize(
    "value", ["os", "json", "trl", "trl_hotfix", "yaml", "no_such_package", "builtins", "__main__"]
)
def test_a_package_of_another_distribution_is_refused(value: str, install: Install) -> None:
    install(entry=f"acme = {value}")
    refused(f"names '{value}', which acme-fixes has not installed")


def test_a_package_not_in_the_record_is_refused(install: Install) -> None:
    install(recorded=["acme_fixes/patches.yaml"])
    refused("names 'acme_fixes', which acme-fixes has not installed")


def test_a_hidden_package_is_refused(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    hiding = tmp_path / "first" / "acme_fixes"
    hiding.mkdir(parents=True)
    (hiding / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(hiding.parent))
    refused(f"has not installed: it is {hiding}")


def test_a_pack_of_two_distributions_is_refused(install: Install) -> None:
    install()
    install(distribution="other-fixes")
    refused("offered by more than one distribution: acme-fixes, other-fixes")


def test_a_pack_without_patches_yaml_is_refused(install: Install) -> None:
    install(files={"patches.yaml": None})
    refused(r"the pack 'acme' \(acme-fixes==1.2\) has no acme_fixes/patches.yaml")


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"),
    [
        ("patches.yaml", "trl.trainer.dpo_trainer", "os", "line 10: target 'os' is outside 'trl.'"),
        ("patches.yaml", "marks-loss", "no-such", "line 1: id 'no-such' has no module acme_fixes.patches.no_such"),
        ("patches.yaml", "marks-loss", "acme/marks-loss", "line 1: id 'acme/marks-loss' is not lower-case words"),
        ("patches.yaml", "because", "!!python/name:os.system ''", r"line 7: a tag \("),
        ("patches.yaml", "wrapper: mark", "wrapper: marc", "line 10: wrapper: .*; did you mean 'mark'"),
        ("patches/marks_loss.py", MODULE, "import no_such_module", "line 1: .* cannot be imported: ModuleNotFound"),
        ("patches/marks_loss.py", MODULE, "raise SystemExit(3)", "line 1: .* cannot be imported: SystemExit: 3"),
        ("__init__.py", "", "raise RuntimeError('no')", "line 1: .* cannot be imported: RuntimeError: no"),
    ],
)
def test_a_mistake_in_a_pack_names_its_file_and_line(
    name: str, right: str, wrong: str, message: str, install: Install
) -> None:
    files = {name: FILES[name].replace(right, wrong) if right else wrong}
    package = install(files=files)
    refused(f"{package / 'patches.yaml'} has 1 mistake; no patch was applied:\n  {message}", CatalogueError)


def test_a_module_outside_the_distribution_is_refused(install: Install, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "marks_loss.py").write_text(MODULE)
    files = {"patches/marks_loss.py": None, "patches/__init__.py": f"__path__ = [{str(elsewhere)!r}]"}
    install(files=files)
    refused("id 'marks-loss' has no module acme_fixes.patches.marks_loss", CatalogueError)


@given(st.text(max_size=30) | st.sampled_from(["../acme", "os", "acme_fixes", "acme.fixes", "http://x", "\x1b[31m\n"]))
@example("x" * 100_000)
def test_any_text_in_the_variable_is_a_pack_or_one_error(text: str) -> None:
    names = packs.named(None, {"TRL_HOTFIX_PACKS": text})
    if not names:
        return
    modules = set(sys.modules)
    with pytest.raises(PackError) as caught:
        loading.known(names)
    assert str(caught.value).isprintable()
    assert not any(name.startswith("acme") for name in set(sys.modules) - modules)


# Pickles and freeze files


def test_unpickling_applies_a_named_pack(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    trl_hotfix.apply(packs="acme", only=[ID])
    data = pickle.dumps(vars(DPOTrainer)["dpo_loss"])
    trl_hotfix.revert()
    monkeypatch.setattr(engine, "ENGINE", engine.Engine())
    monkeypatch.setenv("TRL_HOTFIX_PACKS", "acme")
    assert pickle.loads(data)(object.__new__(DPOTrainer)) == "patched"
    assert trl_hotfix.status()[ID].state is State.APPLIED
    trl_hotfix.revert()


def test_unpickling_does_not_load_an_unnamed_pack(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(files={"__init__.py": "raise RuntimeError('imported')"})
    reference = ("trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", ((ID, 3, ()),))
    assert engine.restore(reference) is leaf.DPOTrainer.dpo_loss
    assert f"a pickle asks for {ID}, revision 3; here it is not known" in caplog.text
    assert "TRL_HOTFIX_PACKS" in caplog.text
    assert "acme_fixes" not in sys.modules


def test_a_freeze_file_does_not_load_its_packs(install: Install, tmp_path: Path) -> None:
    install()
    record = trl_hotfix.apply(packs="acme", only=[ID]).freeze()
    assert record["packs"] == {"acme": "acme-fixes==1.2"}
    assert [patch["id"] for patch in record["patches"]] == [ID]
    file = tmp_path / "trl_hotfix.json"
    file.write_text(json.dumps(record))
    reapplied = trl_hotfix.apply(only=f"@{file}", packs="acme")
    assert reapplied.freeze() == record
    with pytest.raises(SettingError) as caught:
        trl_hotfix.apply(only=f"@{file}")
    reason = "\n  it is of the pack 'acme', which you have not named: packs=[...] or TRL_HOTFIX_PACKS"
    assert reason in str(caught.value)
    assert str(caught.value).count("\n") == 2

    file.write_text(json.dumps({**record, "packs": {"acme": "others-fixes==1.2"}}))
    with pytest.raises(SettingError, match="the pack 'acme' is of 'others-fixes' there, of 'acme-fixes' here"):
        trl_hotfix.apply(only=f"@{file}", packs="acme")


@pytest.mark.parametrize("recorded", [None, {"releases": [], "targets": {}}, BODIES])
def test_list_and_doctor_say_what_the_run_says(install: Install, tmp_path: Path, recorded: Any) -> None:
    install(files={"fingerprints.json": json.dumps(recorded) if recorded is not None else None})
    run_says = trl_hotfix.apply(packs="acme")
    on = run_says[ID].state is State.APPLIED
    assert on == (recorded is BODIES)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)]), "TRL_HOTFIX_PACKS": "acme"}
    for command in ("list", "doctor"):
        process = run(command, "--json", **variables)
        answer = json.loads(process.stdout)
        assert (process.returncode, answer["digest"]) == (0 if on else 1, run_says.digest)
        if command == "doctor":
            assert [ID in entry["problem"] and "unknown-body" in entry["problem"] for entry in answer["problems"]] == (
                [] if on else [True]
            )
        else:
            (listed,) = (patch for patch in answer["patches"] if patch["id"] == ID)
            expected = ("pending", "applies") if on else ("skipped", "unknown-body")
            assert (listed["state"], listed["reason"]) == expected
    tried = json.loads(run("list", "--json", **variables, TRL_HOTFIX_UNKNOWN_BODY="try").stdout)
    assert {patch["state"] for patch in tried["patches"] if patch["id"] == ID} == {"pending"}
    assert trl_hotfix.apply(packs="acme", dry_run=True).digest == run_says.digest
