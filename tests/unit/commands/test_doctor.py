"""``trl-hotfix doctor``: what is installed, and what is wrong with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import doctor
from trl_hotfix.commands.doctor import answer as answer_types
from trl_hotfix.commands.doctor import variables

from helpers.command_line import CHECKOUT, ID, run, without_trl


def diagnosis(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    process = run("doctor", "--json", *arguments, **variables)
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)


def test_doctor_describes_a_healthy_installation() -> None:
    code, answer = diagnosis()
    assert (code, answer["problems"]) == (0, [])
    assert answer["python"]["executable"] == doctor._without_home(sys.executable)
    assert (answer["trl"]["version"], answer["trl"]["kind"]) == ("0.11.4", "release")
    assert answer["hook"]["effective"] is True
    assert answer["files"]["patches"]["count"] == len(loading.load())
    assert answer["digest"] == json.loads(run("list", "--json").stdout)["digest"]
    assert [file["name"] for file in answer["pth"] if file["name"] == "trl_hotfix_autoapply.pth" and file["ours"]]
    text = run("doctor").stdout
    assert "no problem found" in text
    assert "TRL           0.11.4, release" in text


def test_doctor_has_its_declared_fields() -> None:
    _, answer = diagnosis()
    assert list(answer) == list(answer_types.Answer.__annotations__)
    assert list(answer["trl"]) == list(answer_types.Trl.__annotations__)
    assert list(answer["hook"]) == list(answer_types.Hook.__annotations__)


def test_doctor_imports_neither_torch_nor_trl() -> None:
    code = (
        "import sys; from trl_hotfix.commands.main import main\ntry: main(['doctor'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'trl', 'wrapt') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1] == "[]"


def problems(answer: dict[str, Any]) -> str:
    return "\n".join(row["problem"] for row in answer["problems"])


def test_doctor_reports_an_invalid_manifest_and_goes_on(source: Path) -> None:
    (source / "patches.yaml").write_text("- id: [")
    code, answer = diagnosis(PYTHONPATH=str(source))
    assert code == 1
    assert "patches.yaml has 1 mistake" in problems(answer)
    assert (answer["files"]["patches"]["count"], answer["digest"]) == (None, None)
    assert answer["trl"]["version"] == "0.11.4"


def test_doctor_shows_no_secret_and_no_home_folder(tmp_path: Path) -> None:
    file = tmp_path / "home" / "somebody" / "frozen.json"
    file.parent.mkdir(parents=True)
    for arguments in ((), ("--json",)):
        process = run(
            *("doctor", *arguments),
            HOME=str(file.parent),
            HF_TOKEN="hf_secret",
            TRL_HOTFIX_ONLY=f"@{file}",
        )
        assert "~/frozen.json" in process.stdout
        assert "hf_secret" not in process.stdout
        assert "HF_TOKEN" not in process.stdout
        assert "somebody" not in process.stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/x", "~/x"),
        ("in /home/me, and '/home/me/y'", "in ~, and '~/y'"),
        ("/home/memory/x", "/home/memory/x"),
        ("/mnt/home/me/x", "/mnt/home/me/x"),
    ],
)
def test_only_the_home_folder_is_shortened(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert doctor._without_home({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


# Variables


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TRL_HOTFIX", "maybe", "Expected one of 1, true, yes, on, strict, strict-all, observe"),
        ("TRL_HOTFIX_SKP", "x", "did you mean 'TRL_HOTFIX_SKIP'?"),
        ("TRL_HOTFIX_SKIP", ID[:-1], f"did you mean '{ID}'?"),
        ("TRL_HOTFIX_ONLY", "@/no/such/file", "No such file"),
        ("TRL_HOTFIX_OPTIONS", "grpo-loss-normalisation.normalisation=globl", "did you mean 'global'?"),
        ("TRL_HOTFIX_PACKS", "nobodys", "no pack 'nobodys' is installed"),
        ("TRL_HOTFIX_CALLBACK", "strict", "Expected one of 1, true, yes, on, 0"),
        ("TRL_HOTFIX_PATIENCE", "nan", "expected a number of seconds"),
        ("TRL_HOTFIX_LOG", "loud", "expected quiet, summary, full; it is taken as summary"),
        ("TRL_HOTFIX_LOG_FORMAT", "xml", "expected text, json; it is taken as text"),
        ("TRL_HOTFIX_UNKNOWN_BODY", "tri", "expected 'skip' or 'try'"),
    ],
)
def test_doctor_marks_an_invalid_variable(name: str, value: str, expected: str) -> None:
    code, answer = diagnosis(**{name: value})
    stops_import = name not in ("TRL_HOTFIX_SKP", "TRL_HOTFIX_PATIENCE", "TRL_HOTFIX_LOG", "TRL_HOTFIX_LOG_FORMAT")
    assert code == (2 if stops_import else 1)
    (variable,) = (row for row in answer["variables"] if row["name"] == name)
    assert variable["value"] == value
    assert expected in variable["problem"]
    assert expected in problems(answer)


def test_a_policy_that_another_release_needs_is_a_problem(tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    assert run("freeze", "--trl", "1.9.0", "-o", str(policy)).returncode == 0
    code, answer = diagnosis(TRL_HOTFIX_ONLY=f"@{policy}")
    assert code == 1
    assert re.fullmatch(r"you named what cannot be on here: [\w-]+ \(trl-version: .*; and \d+ more", problems(answer))


@pytest.mark.parametrize("value", ["1", "strict", "on"])
def test_doctor_accepts_a_valid_variable(value: str) -> None:
    code, answer = diagnosis(TRL_HOTFIX=value, TRL_HOTFIX_SKIP=ID, TRL_HOTFIX_CALLBACK="0", TRL_HOTFIX_PATIENCE="5")
    assert (code, [variable["problem"] for variable in answer["variables"]]) == (0, [None] * 4)


@pytest.mark.parametrize(("flag", "works"), [("-S", False), ("-I", True), ("-E", True)])
def test_doctor_does_not_contradict_itself_about_the_hook(flag: str, works: bool) -> None:
    start = f"import sys; sys.path[:0] = {[str(CHECKOUT), *sys.path]!r}\n"
    start += "from trl_hotfix.commands.main import main; main(['doctor', '--json'])"
    command = [sys.executable, flag, "-c", start]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert answer["hook"]["effective"] is works
    assert (answer["hook"]["problem"] is None) is works
    assert ("TRL_HOTFIX=1 does nothing here: Python runs with -S" in problems(answer)) is not works


def test_doctor_reports_that_0_turns_everything_off() -> None:
    code, answer = diagnosis(TRL_HOTFIX="0", TRL_HOTFIX_SKIP="nobodys-patch")
    assert code == 1  # Nothing else is read then, so that nothing stops the import.
    assert "turns everything off" in problems(answer)


def test_doctor_knows_every_variable_that_the_code_reads() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "trl_hotfix").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"TRL_HOTFIX(?:_[A-Z]+)+\b", text)}
    problems = {name: variables._problem(name, "", (), ()) or "" for name in used}
    assert [name for name, problem in problems.items() if problem.startswith("trl_hotfix has no")] == []


# TRL


@pytest.mark.parametrize("version", [None, "0.7.4"])
def test_doctor_without_a_supported_trl_is_exit_4(tmp_path: Path, version: str | None) -> None:
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([without_trl(tmp_path, version), str(CHECKOUT)]))
    assert code == 4
    assert answer["trl"]["supported"] is False
    assert ("not installed" if version is None else "TRL 0.7.4 is not supported") in problems(answer)


def test_doctor_detects_two_installations_of_trl(tmp_path: Path) -> None:
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([without_trl(tmp_path, "0.12.0"), str(CHECKOUT)]))
    assert code == 1
    assert "but the version 0.12.0 comes from" in problems(answer)
    assert answer["trl"]["others"] == [doctor._without_home(str(tmp_path / "trl"))]


def test_doctor_names_a_second_trl_that_is_behind_the_first(tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "trl").mkdir(parents=True)
    (old / "trl" / "__init__.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(old)!r})\n")
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert (code, answer["problems"]) == (0, [])
    assert answer["trl"]["others"] == [doctor._without_home(str(old / "trl"))]


@pytest.mark.parametrize(
    ("version", "editable", "kind"),
    [
        ("1.17.0.dev0", False, "development version"),
        ("0.12.0+mine", False, "fork"),
        ("1.17.0.dev0", True, "development version, editable checkout"),
        ("0.12.0", False, "release"),
    ],
)
def test_doctor_tells_releases_from_other_versions(tmp_path: Path, version: str, editable: bool, kind: str) -> None:
    without_trl(tmp_path, version)
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("")
    if editable:
        origin = {"url": "file:///x", "dir_info": {"editable": True}}
        (tmp_path / f"trl-{version}.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert answer["trl"]["kind"] == kind
    assert answer["trl"]["folder"] == doctor._without_home(str(tmp_path / "trl"))
    assert (code, answer["problems"]) == (0, [])


# Others in the environment


def test_doctor_names_other_patchers_with_advice(tmp_path: Path) -> None:
    folder = tmp_path / "unsloth-2026.10.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 2026.10.9\n")
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    (patcher,) = answer["patchers"]
    assert (patcher["name"], patcher["version"], code) == ("unsloth", "2026.10.9", 0)
    assert "displaced" in patcher["look"]


def test_doctor_names_foreign_finders(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Nosy:\n    def find_spec(self, *a): return None\nsys.meta_path.insert(0, Nosy())\n"
    )
    _, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert "sitecustomize.Nosy" in answer["finders"]
    assert not [finder for finder in answer["finders"] if finder.startswith(("_frozen", "trl_hotfix"))]


def test_doctor_detects_an_ineffective_hook(tmp_path: Path) -> None:
    # sitecustomize runs after every .pth file.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; hooks = sys.modules.get('trl_hotfix.import_hooks')\n"
        "if hooks is not None: hooks.FINDER._before.clear()\n"
    )
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert answer["hook"]["problem"] is None
    assert answer["hook"]["effective"] is False
    assert code == 1
    assert "a fresh Python with TRL_HOTFIX=1 does not wait for TRL" in problems(answer)
