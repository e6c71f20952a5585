"""``doctor``, ``run``, ``freeze`` and ``new``: what they print, write and refuse, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import doctor
from trl_hotfix.commands.doctor import answer as answer_types
from trl_hotfix.commands.doctor import variables
from trl_hotfix.commands.new import Answer

CHECKOUT = Path(__file__).parents[2]
ID = "moe-aux-loss-lost-under-deepspeed"
NEW = "dpo-made-up-bug"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"
HOOKED = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('TRL_HOTFIX')}))"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    command = [sys.executable, "-m", "trl_hotfix", *arguments]
    # `python -m` puts the working folder first on the path: not the checkout, where a test has a copy of the package.
    cwd = CHECKOUT / "tests"
    return subprocess.run(command, env={**kept, **variables}, cwd=cwd, capture_output=True, text=True, check=False)


def without_trl(folder: Path, version: str | None) -> str:
    """A folder for PYTHONPATH in which TRL is of this version, or is not to be found."""
    if version is None:
        (folder / "sitecustomize.py").write_text(
            "import importlib.metadata as m\nreal = m.distribution\n"
            "def distribution(name):\n    if name == 'trl': raise m.PackageNotFoundError(name)\n    return real(name)\n"
            "m.distribution = distribution\n"
        )
    else:
        (folder / f"trl-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n"
        (folder / f"trl-{version}.dist-info" / "METADATA").write_text(metadata)
    return str(folder)


def diagnosis(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    process = run("doctor", "--json", *arguments, **variables)
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)


def problems(answer: dict[str, Any]) -> str:
    return "\n".join(row["problem"] for row in answer["problems"])


# doctor


def test_doctor_says_what_is_installed_and_finds_nothing_wrong_here() -> None:
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
    assert "TRL            0.11.4, release" in text


def test_doctor_has_the_fields_that_it_declares() -> None:
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


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TRL_HOTFIX", "maybe", "expected 1, strict or 0"),
        ("TRL_HOTFIX_SKP", "x", "did you mean 'TRL_HOTFIX_SKIP'?"),
        ("TRL_HOTFIX_SKIP", ID[:-1], f"did you mean '{ID}'?"),
        ("TRL_HOTFIX_ONLY", "@/no/such/file", "No such file"),
        ("TRL_HOTFIX_OPTIONS", "grpo-loss-normalisation.normalisation=globl", "did you mean 'global'?"),
        ("TRL_HOTFIX_PACKS", "nobodys", "no pack 'nobodys' is installed"),
        ("TRL_HOTFIX_CALLBACK", "strict", "expected 1 or 0"),
        ("TRL_HOTFIX_PATIENCE", "nan", "expected a number of seconds"),
        ("TRL_HOTFIX_UNKNOWN_BODY", "tri", "expected skip or try"),
    ],
)
def test_doctor_marks_a_variable_that_is_wrong(name: str, value: str, expected: str) -> None:
    code, answer = diagnosis(**{name: value})
    assert code == 1
    (variable,) = (row for row in answer["variables"] if row["name"] == name)
    assert variable["value"] == value
    assert expected in variable["problem"]
    assert expected in problems(answer)


@pytest.mark.parametrize("value", ["1", "strict", "on"])
def test_doctor_has_nothing_against_a_variable_that_is_right(value: str) -> None:
    code, answer = diagnosis(TRL_HOTFIX=value, TRL_HOTFIX_SKIP=ID, TRL_HOTFIX_CALLBACK="0", TRL_HOTFIX_PATIENCE="5")
    assert (code, [variable["problem"] for variable in answer["variables"]]) == (0, [None] * 4)


def test_doctor_says_that_0_turns_everything_off() -> None:
    code, answer = diagnosis(TRL_HOTFIX="0")
    assert code == 1
    assert "turns everything off" in problems(answer)


def test_doctor_knows_every_variable_that_the_code_reads() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "trl_hotfix").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"TRL_HOTFIX(?:_[A-Z]+)+\b", text)}
    problems = {name: variables._wrong(name, "", (), ()) or "" for name in used}
    assert [name for name, problem in problems.items() if problem.startswith("trl_hotfix has no")] == []


@pytest.mark.parametrize("version", [None, "0.7.4"])
def test_doctor_without_a_trl_is_exit_4_and_says_so(tmp_path: Path, version: str | None) -> None:
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([without_trl(tmp_path, version), str(CHECKOUT)]))
    assert code == 4
    assert answer["trl"]["supported"] is False
    assert ("not installed" if version is None else "TRL 0.7.4 is not supported") in problems(answer)


def test_doctor_sees_that_the_version_and_the_code_of_trl_are_two_installs(tmp_path: Path) -> None:
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([without_trl(tmp_path, "0.12.0"), str(CHECKOUT)]))
    assert code == 1
    assert "but the version 0.12.0 is that of" in problems(answer)


@pytest.mark.parametrize(
    ("version", "editable", "kind"),
    [
        ("1.17.0.dev0", False, "development version"),
        ("0.12.0+mine", False, "fork"),
        ("1.17.0.dev0", True, "development version, editable checkout"),
        ("0.12.0", False, "release"),
    ],
)
def test_doctor_tells_a_release_from_what_is_none(tmp_path: Path, version: str, editable: bool, kind: str) -> None:
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


def test_doctor_names_other_patchers_and_what_to_look_at(tmp_path: Path) -> None:
    folder = tmp_path / "unsloth-2026.10.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 2026.10.9\n")
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    (patcher,) = answer["patchers"]
    assert (patcher["name"], patcher["version"], code) == ("unsloth", "2026.10.9", 0)
    assert "displaced" in patcher["look"]


def test_doctor_names_finders_of_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Nosy:\n    def find_spec(self, *a): return None\nsys.meta_path.insert(0, Nosy())\n"
    )
    _, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert "sitecustomize.Nosy" in answer["finders"]
    assert not [finder for finder in answer["finders"] if finder.startswith(("_frozen", "trl_hotfix"))]


def test_doctor_sees_a_hook_that_is_there_and_does_nothing(tmp_path: Path) -> None:
    # It runs after every .pth file.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'trl_hotfix' not in type(f).__module__]\n"
    )
    code, answer = diagnosis(PYTHONPATH=os.pathsep.join([str(tmp_path), str(CHECKOUT)]))
    assert answer["hook"]["problem"] is None
    assert answer["hook"]["effective"] is False
    assert code == 1
    assert "a fresh Python with TRL_HOTFIX=1 does not wait for TRL" in problems(answer)


def test_doctor_reads_a_broken_manifest_and_goes_on(package: Path) -> None:
    (package / "patches.yaml").write_text("- id: [")
    code, answer = diagnosis(PYTHONPATH=str(package.parent))
    assert code == 1
    assert "patches.yaml has 1 mistake" in problems(answer)
    assert (answer["files"]["patches"]["count"], answer["digest"]) == (None, None)
    assert answer["trl"]["version"] == "0.11.4"


def test_doctor_shows_no_other_variable_and_no_home(tmp_path: Path) -> None:
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
def test_only_the_home_folder_itself_is_shortened(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert doctor._without_home({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


# run


def test_run_hands_its_options_to_the_command_and_to_what_that_starts() -> None:
    process = run("run", "--skip", ID, "--", "sh", "-c", '"$0" -c "$1"', sys.executable, HOOKED)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {"TRL_HOTFIX": "1", "TRL_HOTFIX_SKIP": ID}


@pytest.mark.parametrize(
    ("arguments", "before", "value"),
    [
        ([], {}, "1"),
        (["--strict"], {}, "strict"),
        ([], {"TRL_HOTFIX": "strict"}, "strict"),
        ([], {"TRL_HOTFIX": "0"}, "1"),
    ],
)
def test_run_is_on_or_strict(arguments: list[str], before: dict[str, str], value: str) -> None:
    process = run("run", *arguments, sys.executable, "-c", HOOKED, **before)
    assert json.loads(process.stdout) == {"TRL_HOTFIX": value}


def test_what_run_starts_waits_for_trl() -> None:
    code = "import sys; print([type(finder).__module__ for finder in sys.meta_path][0])"
    assert run("run", "--", sys.executable, "-c", code).stdout == "trl_hotfix.import_hooks\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", ID[:-1]], f"did you mean '{ID}'?"),
        (["--only", ""], "--only names no patch"),
        (["--only", "@/no/such.json"], "No such file"),
        (["--only", "@x.json", "--skip", ID], "leave --skip and --options out"),
        (["--skip", "x"], "unknown patch"),
        (["--options", "grpo-loss-normalisation.normalization=global"], "did you mean 'normalisation'?"),
        (["--packs", "nobodys"], "no pack 'nobodys'"),
        (["--sikp", "x"], "--skip"),
    ],
)
def test_run_looks_at_its_options_before_the_job_starts(arguments: list[str], expected: str) -> None:
    process = run("run", *arguments, "--", "echo", "started")
    assert (process.returncode, process.stdout) == (2, "")
    assert expected in process.stderr
    assert "Traceback" not in process.stderr


def test_run_refuses_a_variable_that_the_job_would_refuse() -> None:
    process = run("run", "--", "echo", "started", TRL_HOTFIX_UNKNOWN_BODY="maybe")
    assert (process.returncode, process.stdout) == (2, "")
    assert "'maybe'" in process.stderr


def test_run_without_a_command_is_a_usage_error() -> None:
    for arguments in ((), ("--",), ("--", "")):
        assert run("run", *arguments).returncode == 2


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_of_run_is_that_of_the_command(code: int) -> None:
    assert run("run", "--", "sh", "-c", f"exit {code}").returncode == code


def test_signals_are_those_of_the_command() -> None:
    assert run("run", "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    # What Python ignores is not ignored in the command: writing to a pipe that nobody reads ends it.
    assert run("run", "--", "sh", "-c", "kill -PIPE $$; echo still here").returncode == -signal.SIGPIPE


def test_run_is_replaced_by_the_command() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_hotfix", "run", "--", "sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True
    )
    assert process.communicate()[0] == f"{process.pid}\n"


def test_a_command_that_is_not_found_or_cannot_be_run_has_the_exit_codes_of_a_shell(tmp_path: Path) -> None:
    process = run("run", "--", "no-such-command")
    assert (process.returncode, process.stderr.count("\n")) == (127, 1)
    assert "'no-such-command' is not found" in process.stderr
    (tmp_path / "data").write_text("no program")
    process = run("run", "--", str(tmp_path / "data"))
    assert (process.returncode, process.stderr.count("\n")) == (126, 1)
    assert "Permission denied" in process.stderr


def test_options_behind_the_command_are_its_own() -> None:
    assert run("run", "echo", "--list", "--verify", "--strict", "--", "-h").stdout == "--list --verify --strict -- -h\n"


def test_run_refuses_where_the_hook_cannot_work() -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    start = f"import sys; sys.path[:0] = {[str(CHECKOUT)]!r}\n"
    start += "from trl_hotfix.commands.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-I", "-c", start, "run", "--", "echo", "started"]
    process = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert "Python runs with -I" in process.stderr
    assert "The job was not started." in process.stderr


def test_run_says_that_there_is_no_trl_and_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([without_trl(tmp_path, None), str(CHECKOUT)])
    process = run("run", "--", "echo", "started", PYTHONPATH=path)
    assert (process.returncode, process.stdout) == (0, "started\n")
    assert "TRL is not installed" in process.stderr


def test_the_freeze_file_of_run_is_found_from_any_folder_and_strict_refuses_what_cannot_be_on(tmp_path: Path) -> None:
    frozen = CHECKOUT / "tests" / "frozen.tmp.json"
    try:
        frozen.write_text(run("freeze").stdout)
        process = run("run", "--only", f"@{frozen.name}", "--", sys.executable, "-c", HOOKED)
        assert json.loads(process.stdout)["TRL_HOTFIX_ONLY"] == f"@{frozen}"
    finally:
        frozen.unlink()
    record = {"patches": [{"id": "grpo-dapo-normaliser", "revision": revision("grpo-dapo-normaliser"), "options": {}}]}
    (tmp_path / "other.json").write_text(json.dumps(record))
    only = ("--only", f"@{tmp_path / 'other.json'}")
    assert run("run", *only, "--", "echo", "started").stdout == "started\n"
    process = run("run", "--strict", *only, "--", "echo", "started")
    assert (process.returncode, process.stdout) == (1, "")
    assert "grpo-dapo-normaliser: skipped (trl-version)" in process.stderr


def revision(patch_id: str) -> int:
    return next(patch.revision for patch in loading.load() if patch.id == patch_id)


# freeze


def test_what_is_frozen_is_applied_with_the_same_digest(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    process = run("freeze", "-o", str(file), TRL_HOTFIX_SKIP="dpo-eval-reference-from-trained-policy")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    frozen, listed = json.loads(file.read_text()), json.loads(run("list", "--json").stdout)
    assert frozen["digest"] != listed["digest"]
    reapplied = json.loads(run("list", "--json", TRL_HOTFIX_ONLY=f"@{file}").stdout)
    assert reapplied["digest"] == frozen["digest"]
    pending = [patch["id"] for patch in reapplied["patches"] if patch["state"] == "pending"]
    assert sorted(pending) == sorted(patch["id"] for patch in frozen["patches"])
    assert ID in pending
    assert [path.name for path in tmp_path.iterdir()] == ["set.json"]


def test_freeze_prints_what_it_would_write(tmp_path: Path) -> None:
    process = run("freeze")
    run("freeze", "-o", str(tmp_path / "set.json"))
    assert (tmp_path / "set.json").read_text() == process.stdout
    assert json.loads(process.stdout)["trl"] == "0.11.4"


def test_freeze_overwrites_only_if_it_is_told_to(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text("mine")
    process = run("freeze", "-o", str(file))
    assert (process.returncode, file.read_text()) == (2, "mine")
    assert "--force overwrites it" in process.stderr
    assert run("freeze", "--force", "-o", str(file)).returncode == 0
    assert json.loads(file.read_text())["digest"]


@pytest.mark.parametrize("path", ["no/such/folder/set.json", "."])
def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path, path: str) -> None:
    process = run("freeze", "--force", "-o", str(tmp_path / path))
    assert process.returncode == 2
    assert "cannot be written" in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.commands import freeze

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        freeze._write(tmp_path / "set.json", "text", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [None, "0.7.4"])
def test_freeze_without_a_trl_is_exit_4_and_no_file(tmp_path: Path, version: str | None) -> None:
    path = os.pathsep.join([without_trl(tmp_path, version), str(CHECKOUT)])
    process = run("freeze", "-o", str(tmp_path / "set.json"), PYTHONPATH=path)
    assert (process.returncode, process.stdout) == (4, "")
    assert not (tmp_path / "set.json").exists()


# new


@pytest.fixture
def checkout(package: Path) -> Path:
    """A copy of what ``new`` looks for in a checkout; the package in it is the one that runs."""
    folder = package.parent
    (package / "patches.yaml").replace(folder / "patches.yaml")
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    (folder / "tests" / "proofs").mkdir(parents=True)
    shutil.copytree(CHECKOUT / "tests" / "tiny", folder / "tests" / "tiny")
    return folder


def new(checkout: Path, *arguments: str, target: str = TARGET, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(checkout), variables.pop("PYTHONPATH", "")]))
    return run("new", *arguments, "--target", target, PYTHONPATH=path, **variables)


def as_listed(checkout: Path, patch_id: str) -> dict[str, Any]:
    process = run("list", "--json", PYTHONPATH=str(checkout))
    assert process.returncode == 0, process.stderr
    return next(patch for patch in json.loads(process.stdout)["patches"] if patch["id"] == patch_id)


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_new_writes_three_parts_that_are_red_and_the_list_still_works(checkout: Path) -> None:
    before = everything(checkout)
    process = new(checkout, NEW, "--pull", "1234", "--title", 'The "loss": wrong by 2')
    assert process.returncode == 0, process.stderr
    after = everything(checkout)
    module, proof = "trl_hotfix/patches/dpo_made_up_bug.py", "tests/proofs/dpo_made_up_bug.py"
    assert set(after) - set(before) == {module, proof}
    assert [name for name in before if before[name] != after[name]] == ["patches.yaml"]
    assert after["patches.yaml"].startswith(before["patches.yaml"])
    listed = as_listed(checkout, NEW)
    assert (listed["id"], listed["title"], listed["severity"]) == (NEW, 'The "loss": wrong by 2', "wrong-loss")
    assert (listed["trl"], listed["review_by"], listed["upstream"]["fix"]) == ("==0.11.4", None, 1234)
    assert (listed["state"], listed["revision"]) == ("pending", 1)
    script = checkout / "train.py"
    script.write_text("from trl import DPOTrainer\nDPOTrainer(model)\n")
    scanned = run("scan", str(script), PYTHONPATH=str(checkout))
    assert NEW in scanned.stdout, scanned.stderr
    verified = run("verify", NEW, "--json", PYTHONPATH=str(checkout))
    (cell,) = json.loads(verified.stdout)["cells"]
    assert (verified.returncode, cell["verdict"]) == (1, "error")
    assert "write the self-test first" in cell["why"]
    # The house style holds for what nobody has touched yet.
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["check"], ["format", "--check"]):
        command = [*ruff, *check, "--config", str(CHECKOUT / "pyproject.toml"), module, proof]
        style = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert style.returncode == 0, style.stdout
    for order, next_step in enumerate(
        ("trl-hotfix verify", "says `proven`", "bench.py run", "trl-hotfix scan", "make matrix"), 1
    ):
        assert f"  {order}. " in process.stdout
        assert next_step in process.stdout


def test_the_proof_of_a_new_patch_fails_until_it_is_written(checkout: Path) -> None:
    new(checkout, NEW)
    code = "import dpo_made_up_bug as proof\nfor function in (proof.train, proof.unaffected):\n    try: function()\n"
    code += "    except NotImplementedError as error: print(str(error)[:21])\n"
    folders = [CHECKOUT, checkout / "tests", checkout / "tests" / "proofs"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.stdout == "write the proof first\n" * 2, process.stderr


def test_new_says_what_it_wrote_as_json(checkout: Path) -> None:
    process = new(checkout, NEW, "--json")
    answer = msgspec.json.decode(process.stdout.encode(), type=Answer, strict=True)
    assert all((checkout / answer[part]).is_file() for part in ("manifest", "module", "proof"))
    assert (answer["id"], answer["trl"], set(json.loads(process.stdout))) == (NEW, "==0.11.4", set(answer))


@pytest.mark.parametrize(("specifiers", "reviewed"), [(">=0.9.6", True), (">=0.9.6,<0.12", False), ("==0.11.*", False)])
def test_a_new_range_without_an_end_has_a_day_of_review(checkout: Path, specifiers: str, reviewed: bool) -> None:
    assert new(checkout, NEW, "--trl", specifiers).returncode == 0
    patch = as_listed(checkout, NEW)
    assert (patch["trl"], patch["review_by"] is not None) == (specifiers, reviewed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((ID,), "already"),
        (("Made-Up",), "lower-case words"),
        (("made_up",), "lower-case words"),
        ((NEW, "--severity", "bad"), "wrong-loss"),
        ((NEW, "--pull", "x"), "--pull"),
        ((NEW, "--pull", "0"), "--pull"),
        ((NEW, "--trl", ">>1"), "is not a range"),
        ((NEW, "--trl", ">=1.0"), "does not have TRL 0.11.4"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer.dpo_los"), "did you mean 'DPOTrainer.dpo_loss'?"),
        ((NEW, "--target", "trl.trainer.dpo_traner:DPOTrainer.dpo_loss"), "did you mean 'trl.trainer.dpo_trainer'?"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer"), "has no 'DPOTrainer' of its own"),
        ((NEW, "--target", "transformers.trainer:Trainer.compute_loss"), "is not MODULE:FUNCTION"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer.a.b"), "is not MODULE:FUNCTION"),
        ((NEW, "--target", "trl.trainer.dpo_trainer"), "is not MODULE:FUNCTION"),
        ((NEW, "--wheel", "nowhere"), "is not a wheel of TRL"),
        ((NEW, "--title", "\x1b[31m"), "is not plain text"),
    ],
)
def test_new_refuses_and_writes_nothing(checkout: Path, arguments: tuple[str, ...], expected: str) -> None:
    before = everything(checkout)
    process = new(checkout, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert expected in " ".join(process.stderr.split())
    assert "Traceback" not in process.stderr
    assert everything(checkout) == before


@pytest.mark.parametrize("existing", ["trl_hotfix/patches/dpo_made_up_bug.py", "tests/proofs/dpo_made_up_bug.py"])
def test_new_does_not_touch_a_file_that_is_there(checkout: Path, existing: str) -> None:
    (checkout / existing).write_text("mine")
    before = everything(checkout)
    process = new(checkout, NEW)
    assert process.returncode == 2
    assert "is there already; nothing was written" in process.stderr
    assert everything(checkout) == before


def test_new_leaves_nothing_if_the_last_write_fails(checkout: Path) -> None:
    # Somebody else's file, of the name that the new manifest has for a moment, cannot be made: the folder is full.
    before = everything(checkout)
    code = (
        "import sys; from pathlib import Path\nfrom trl_hotfix.commands.main import main\n"
        "def fails(self, *a): raise OSError(28, 'No space left on device', str(self))\n"
        f"Path.replace = fails; main(['new', {NEW!r}, '--target', {TARGET!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    assert "No space left on device; nothing was written" in process.stderr
    assert everything(checkout) == before
    assert [path for path in checkout.rglob("*made_up*") if path.is_file()] == []


def test_new_outside_of_a_checkout_says_so(package: Path) -> None:
    process = run("new", NEW, "--target", TARGET, PYTHONPATH=str(package.parent))
    assert process.returncode == 2
    assert "is no checkout of trl_hotfix" in process.stderr
    assert "docs/packs.md" in process.stderr


def test_new_looks_for_the_target_in_the_release_that_is_named(checkout: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    (release / "trl" / "trainer").mkdir(parents=True)
    (release / "trl" / "__init__.py").write_text("")
    (release / "trl" / "trainer" / "future.py").write_text("class Trainer:\n    def step(self):\n        return 1\n")
    (release / "trl-9.0.0.dist-info").mkdir()
    process = new(checkout, NEW, "--wheel", str(release), target="trl.trainer.future:Trainer.step")
    assert process.returncode == 0, process.stderr
    assert '"==9.0.0"' in process.stdout
    assert new(checkout, "another", "--wheel", str(release)).returncode == 2
