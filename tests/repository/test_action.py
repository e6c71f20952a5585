"""The action at the top of the repository scans what a workflow names, with what it accepts and repairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text(encoding="utf-8"))
DROPPED = "dpo-precomputed-ref-logps-dropped"
SCRIPT = """\
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("gpt2")
DPOTrainer(model=model, args=DPOConfig(output_dir="out", precompute_ref_log_probs=True)).train()
"""


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({}, 1, DROPPED),
        ({"ignore": f"{DROPPED} moe-aux-loss-lost-under-deepspeed"}, 0, "has no finding"),
        ({"severity": "wrong-gradient"}, 1, DROPPED),
        ({"fail-on": "unrepaired", "policy": "policy.json"}, 0, DROPPED),
        ({"severity": "$(touch here)"}, 2, "--severity"),
        ({"paths": "none.py"}, 2, "none.py"),
    ],
)
def test_the_step_runs_scan_with_the_inputs(tmp_path: Path, given: dict[str, str], code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    record = {"trl": "0.12.2", "patches": [{"id": DROPPED, "revision": 1, "options": {}}]}
    (tmp_path / "policy.json").write_text(json.dumps(record))
    inputs = {name: given.get(name, one.get("default", "0.12.2")) for name, one in ACTION["inputs"].items()}
    step = ACTION["runs"]["steps"][1]
    variables = {
        name: inputs[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
        env={**os.environ, **variables, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert said in ran.stdout + ran.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy.json", "train.py"]
