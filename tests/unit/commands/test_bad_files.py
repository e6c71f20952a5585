"""Every command against files that are damaged, huge or hostile: one clear error, a stable exit code, soon.

``helpers.bad_files`` has the files. Each command line runs in a process with half a gigabyte and some seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers import forked_commands
from helpers.bad_files import RED, of_suffix
from helpers.command_line import CHECKOUT, ID

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it bounds a process as Linux does")

SCRIPT = "from trl import DPOConfig, DPOTrainer\nDPOTrainer('m', args=DPOConfig('x'))\n"
REMEDIES = (
    "expected ",
    "--trl tells it",
    "--force overwrites it",
    "name it, as in --trainer",
    "it is a folder",
    "which you have not named",
)
"""An error says what was expected, or else what to do."""

SECONDS = 10
"""Of the processor. The slowest, which is 64 KiB of YAML, takes a second."""


@dataclass(frozen=True)
class Entrance:
    """A command line with ``BAD`` in the place of the file, which has this name, or ``FOLDER`` for the one around it.

    ``variable`` names the file instead, with an @ before it. ``beside`` has the other files of the folder.
    """

    line: str
    name: str
    variable: str | None = None
    beside: tuple[tuple[str, str], ...] = ()


MODEL = (("config.json", '{"model_type": "llama", "eos_token_id": 2}'),)
CARD = (("README.md", "- TRL: 0.16.1\n"),)
ONLY = "TRL_HOTFIX_ONLY"
ENTRANCES = (
    Entrance("scan --trl 0.16.1 BAD", "bad.py"),
    Entrance("scan --trl 0.16.1 --format sarif BAD", "bad.py"),
    Entrance("scan --trl 0.16.1 FOLDER", "bad.py"),
    Entrance("scan --trl 0.16.1 BAD", "bad.ipynb"),
    Entrance("scan --trl 0.16.1 BAD", "bad.yaml"),
    Entrance("scan --trl 0.16.1 --trainer dpo --format github BAD", "bad.yaml"),
    Entrance("scan --trl 0.16.1 SCRIPT -- --config BAD", "bad.yaml"),
    Entrance("scan --trl 0.16.1 SCRIPT --accelerate BAD", "bad.yaml"),
    Entrance("scan --trl 0.16.1 SCRIPT --model FOLDER", "config.json"),
    Entrance("scan --trl 0.16.1 SCRIPT --model FOLDER", "tokenizer_config.json", beside=MODEL),
    Entrance("scan --trl 0.16.1 SCRIPT --model FOLDER", "tokenizer.json", beside=MODEL),
    Entrance("audit BAD", "bad.txt"),
    Entrance("audit BAD", "bad.lock"),
    Entrance("audit BAD", "bad.yaml"),
    Entrance("audit BAD", "bad.json"),
    Entrance("audit FOLDER", "training_args.bin", beside=CARD),
    Entrance("audit FOLDER", "README.md"),
    Entrance("audit FOLDER", "trl_hotfix.json", beside=CARD),
    Entrance("compare 0.16.1 1.16.0 BAD", "bad.py"),
    Entrance("compare 0.16.1 1.16.0 BAD", "bad.ipynb"),
    Entrance("compare 0.16.1 1.16.0 BAD", "bad.yaml"),
    Entrance("diff BAD RECORD", "bad.json"),
    Entrance("diff RECORD BAD", "bad.json"),
    Entrance("status BAD", "bad.json"),
    Entrance("status FOLDER", "trl_hotfix.json"),
    Entrance("status FOLDER", "trl_hotfix.rank-3.json", beside=(("trl_hotfix.json", '{"patches": []}'),)),
    Entrance("fingerprint --wheel BAD", "bad.whl"),
    Entrance("freeze --wheel BAD", "bad.whl"),
    Entrance("freeze -o BAD", "bad.json"),
    Entrance(f"explain {ID} --against BAD", "bad.whl"),
    Entrance("new a-patch --target trl.trainer.dpo_trainer:DPOTrainer.x --wheel BAD", "bad.whl"),
    Entrance("list", "bad.json", ONLY),
    Entrance(f"explain {ID}", "bad.json", ONLY),
    Entrance("freeze", "bad.json", ONLY),
    Entrance("doctor", "bad.json", ONLY),
    Entrance("run --only @BAD true", "bad.json"),
)


def outcomes(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(cases))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRL_HOTFIX")}
    process = subprocess.run(
        [sys.executable, forked_commands.__file__, str(folder / "cases.json")],
        env={**kept, "PYTHONPATH": str(CHECKOUT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(process.stdout)
    return answers


def problems(outcome: dict[str, Any], file: str) -> list[str]:
    """Return what is wrong with an outcome."""
    error = outcome["stderr"].removeprefix("trl-hotfix: ").rpartition("Error: ")[2]
    printed = outcome["stdout"] + outcome["stderr"]
    wrong = {
        "a control character": not all(character.isprintable() or character == "\n" for character in printed),
        "a traceback": "Traceback" in printed,
        "another exit code": outcome["code"] not in (0, 1, 2),
        "no single line": outcome["code"] == 2 and not all(line.startswith("  ") for line in error.split("\n")[1:-1]),
        "no remedy": outcome["code"] == 2 and not any(remedy in error for remedy in REMEDIES),
        "no place": outcome["code"] == 2 and file not in error,
        "too long": outcome["code"] == 2 and len(error) > 900,
        "too slow": outcome["seconds"] > SECONDS,
    }
    return [problem for problem, is_so in wrong.items() if is_so]


def in_words(entrance: Entrance) -> str:
    return f"{entrance.line} {entrance.name}"


@pytest.mark.parametrize("entrance", ENTRANCES, ids=in_words)
def test_a_bad_file_is_one_clear_error(entrance: Entrance, tmp_path: Path) -> None:
    others = {"SCRIPT": tmp_path / "good.py", "RECORD": tmp_path / "record.json"}
    others["SCRIPT"].write_text(SCRIPT)
    others["RECORD"].write_text('{"patches": []}')
    kinds = of_suffix(Path(entrance.name).suffix)
    cases = []
    for kind, write in kinds.items():
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        for name, content in entrance.beside:
            (folder / name).write_text(content)
        write(folder / entrance.name)
        words = {**others, "BAD": folder / entrance.name, "FOLDER": folder}
        line = [str(words.get(word, word)).replace("@BAD", f"@{words['BAD']}") for word in entrance.line.split()]
        variables = {entrance.variable: f"@{words['BAD']}"} if entrance.variable is not None else {}
        cases.append({"arguments": line, "environment": variables})
    found = []
    for kind, outcome in zip(kinds, outcomes(cases, tmp_path), strict=True):
        wrong = problems(outcome, str(tmp_path))
        if (tmp_path / kind.replace(" ", "-") / "ran").exists():
            wrong.append("it was run")
        if wrong:
            found.append(f"{kind}: {wrong}: {outcome['code']} {outcome['seconds']} s {outcome['stderr'][-300:]!r}")
    assert not found, "\n".join(found)


ARGUMENTS = (
    *(
        "scan BAD",
        "scan --trl BAD SCRIPT",
        "scan --trainer BAD x.yaml",
        "scan --with BAD SCRIPT",
        "scan --packs BAD SCRIPT",
    ),
    *("scan --format BAD SCRIPT", "scan --model BAD SCRIPT", "scan --accelerate BAD SCRIPT", "scan SCRIPT -- BAD"),
    *("audit BAD", "audit --trl BAD SCRIPT", "compare BAD 1.16.0", "compare 0.16.1 1.16.0 BAD", "diff BAD BAD"),
    *("status BAD", "freeze --trl BAD", "freeze --wheel BAD", "freeze --only BAD", "fingerprint --wheel BAD"),
    *(
        "explain BAD",
        "explain --against BAD",
        "verify BAD",
        "verify --packs BAD",
        "doctor --packs BAD",
        "list --trl BAD",
    ),
    *("list --trainer BAD", "list --severity BAD", "list --packs BAD", "run --only BAD true", "run --options BAD true"),
    *("run --skip BAD true", "new BAD --target BAD", "new a-b --target BAD", "BAD", "--BAD", "list --BAD"),
)


@pytest.mark.parametrize("text", [RED, "9" * 5_000, "[" * 20_000, "\u202ered", "", "x" * 100_000, "%s{0}", "*" * 3_000])
def test_a_bad_argument_is_one_clear_error(text: str, tmp_path: Path) -> None:
    # `--packs ""` names no pack, which is no mistake: verify would run every self-test.
    arguments = [line for line in ARGUMENTS if text or "verify --packs" not in line]
    (tmp_path / "good.py").write_text(SCRIPT)
    words = {"SCRIPT": str(tmp_path / "good.py")}
    cases = [{"arguments": [words.get(word, word).replace("BAD", text) for word in line.split()]} for line in arguments]
    found = []
    for line, outcome in zip(arguments, outcomes(cases, tmp_path), strict=True):
        wrong = set(problems(outcome, "")) - {"no remedy", "too long"}
        if wrong or (outcome["code"] == 0 and text) or len(outcome["stderr"]) > 4_000:
            found.append(f"{line}: {wrong}: {outcome['code']} {outcome['stderr'][-300:]!r}")
    assert not found, "\n".join(found)
