"""Nonsense in the variables stops the import of TRL with one message; what does not choose patches stops nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launched.environments import Environment

# Each case runs in a fork of one process that has imported what TRL needs, since a new process takes seconds.
SCRIPT = """\
import json, os, sys, tempfile
import accelerate, datasets, torch, transformers
from transformers import PreTrainedModel, Trainer, TrainerCallback

def start(case):
    os.environ.update(case)
    from trl_hotfix import autostart
    autostart.start()
    try:
        from trl.trainer.dpo_trainer import DPOTrainer
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return vars(DPOTrainer)["get_batch_loss_metrics"].__module__

answers = []
for case in json.load(open(sys.argv[1])):
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if not child:
            os.dup2(stderr.fileno(), 2)
            try:
                os.write(2, start(case).encode())
            except SystemExit as stopped:
                os._exit(stopped.code)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stderr.seek(0)
        answers.append((code, stderr.read().decode(errors="replace")))
print(json.dumps(answers))
"""
NONSENSE = [
    "\x1b[31mred\nWARNING: more",
    "x" * 100_000,
    "../x",
    "os.system",
    "http://x/y",
    "é\udcff",
    "a=b,c.d=e,,",
    "%s",
]
VARIABLES = ("ONLY", "SKIP", "OPTIONS", "PACKS", "UNKNOWN_BODY")


def test_nonsense_in_a_variable_is_one_message_and_no_trl(installed: Environment, tmp_path: Path) -> None:
    pairs = zip(itertools.cycle(VARIABLES), NONSENSE, strict=False)
    nonsense = [{"TRL_HOTFIX": "1", f"TRL_HOTFIX_{name}": value} for name, value in pairs]
    for content in (
        "",
        "[" * 50_000,
        '{"patches": [{"id": "no\\nsuch", "revision": 1}]}',
        '{"patches": 1, "patches": 2}',
    ):
        file = tmp_path / f"{len(nonsense)}.json"
        file.write_text(content)
        nonsense.append({"TRL_HOTFIX": "1", "TRL_HOTFIX_ONLY": f"@{file}"})
    nonsense += [
        {"TRL_HOTFIX": "1", "TRL_HOTFIX_ONLY": file}
        for file in ("@/dev/zero", "@/dev/stdin", "@/proc/kmsg", "@/", "@", "@\x1b")
    ]
    nonsense += [{"TRL_HOTFIX": value} for value in (NONSENSE[0], NONSENSE[1])]
    nonsense += [{"TRL_HOTFIX": "1", "TRL_HOTFIX_CALLBACK": NONSENSE[0]}]
    harmless = [{"TRL_HOTFIX": "1", "RANK": "%(x)s\n"}, {"TRL_HOTFIX": "1", "TRL_HOTFIX_LOG": NONSENSE[0]}]
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cases.json").write_text(json.dumps([*nonsense, *harmless]))
    process = installed.run(str(tmp_path / "script.py"), str(tmp_path / "cases.json"), PYTHONWARNINGS="ignore")
    answers = json.loads(process.stdout)
    assert len(answers) == len(nonsense) + len(harmless)
    for case, (code, stderr) in zip([*nonsense, *harmless], answers, strict=True):
        assert code == (0 if case in harmless else 2), (case, stderr)
        assert "Traceback" not in stderr
        assert "\x1b" not in stderr, case
        assert len(stderr) < 10_000, case
        assert "\nWARNING: more" not in stderr
        assert stderr.endswith("trl_hotfix.patching.pickled") == (case in harmless), (case, stderr)
        assert stderr.count("trl_hotfix: ERROR") == (case not in harmless), (case, stderr)
        assert stderr.count("trl_hotfix: WARNING") == ("TRL_HOTFIX_LOG" in case), (case, stderr)
