"""Nonsense in the variables at start-up: TRL is imported as it is, with a warning, and never with an exception."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Environment

# Forks of one process that has imported what TRL needs, since a process of its own for each case takes seconds.
SCRIPT = """\
import json, os, sys, tempfile
import accelerate, datasets, torch, transformers
from transformers import PreTrainedModel, Trainer, TrainerCallback

def start(case):
    os.environ.update(case)
    from trl_hotfix import autostart
    autostart.start()
    from trl.trainer.dpo_trainer import DPOTrainer
    return type(vars(DPOTrainer)["get_batch_loss_metrics"]).__name__

answers = []
for case in json.load(open(sys.argv[1])):
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            os.write(2, start(case).encode())
            os._exit(0)
        code = os.waitpid(child, 0)[1]
        said.seek(0)
        answers.append((code, said.read().decode(errors="replace")))
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


def test_nonsense_in_any_variable_is_one_warning_and_trl_as_it_is(installed: Environment, tmp_path: Path) -> None:
    pairs = zip(itertools.cycle(VARIABLES), NONSENSE, strict=False)
    wrong = [{"TRL_HOTFIX": "1", f"TRL_HOTFIX_{name}": value} for name, value in pairs]
    for content in (
        "",
        "[" * 50_000,
        '{"patches": [{"id": "no\\nsuch", "revision": 1}]}',
        '{"patches": 1, "patches": 2}',
    ):
        file = tmp_path / f"{len(wrong)}.json"
        file.write_text(content)
        wrong.append({"TRL_HOTFIX": "1", "TRL_HOTFIX_ONLY": f"@{file}"})
    wrong += [
        {"TRL_HOTFIX": "1", "TRL_HOTFIX_ONLY": each} for each in ("@/dev/zero", "@/dev/stdin", "@/", "@", "@\x1b")
    ]
    wrong += [{"TRL_HOTFIX": NONSENSE[0]}]
    right = [{"TRL_HOTFIX": "1", "RANK": "%(x)s\n"}, {"TRL_HOTFIX": "1", "TRL_HOTFIX_CALLBACK": NONSENSE[0]}]
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cases.json").write_text(json.dumps([*wrong, *right]))
    done = installed.run(str(tmp_path / "script.py"), str(tmp_path / "cases.json"), PYTHONWARNINGS="ignore")
    answers = json.loads(done.stdout)
    assert len(answers) == len(wrong) + len(right)
    for case, (code, said) in zip([*wrong, *right], answers, strict=True):
        assert code == 0, (case, said)
        assert "Traceback" not in said
        assert "\x1b" not in said, case
        assert "\nWARNING: more" not in said
        assert said.endswith("HotfixWrapper" if case in right else "function"), (case, said)
        assert said.count("trl_hotfix: WARNING") == (0 if "RANK" in case else 1), (case, said)
