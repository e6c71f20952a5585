"""Record the whole way in a terminal: scan, verify, train with the repairs, status, audit, compare.

``make recording`` runs it, for each release of trl_hotfix. It writes ``docs/recording.cast``, an asciinema cast, and
draws it as ``docs/recording.svg``.
Everything in it is the real output of these commands, on the TRL that is installed, with a tiny model and no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
CAST, DRAWING = CHECKOUT / "docs" / "recording.cast", CHECKOUT / "docs" / "recording.svg"
COLUMNS, ROWS = 80, 56
PAUSE = 6000
"""How long a screen is shown, in milliseconds. A step of the training may have taken longer."""

SCRIPT = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="data.jsonl", split="train")
args = SFTConfig(
    output_dir="output_dir",
    dataset_text_field="text",
    max_seq_length=64,
    max_steps=2,
    disable_tqdm=True,
)
SFTTrainer(model, args, tokenizer=tokenizer, train_dataset=data).train()
"""

COMMANDS = (
    "cat train.py",
    "trl-hotfix scan train.py --model model",
    # Without the progress bar, of which each step would be a picture.
    "trl-hotfix verify sft-eos-masked-when-pad-is-eos 2> log",
    "TRL_HOTFIX=1 python train.py",
    "trl-hotfix status output_dir/",
    "trl-hotfix audit output_dir/",
    "trl-hotfix compare 0.16.1 1.16.0 train.py",
)


def main(tools: str) -> None:
    """Record and draw, with asciinema and termtosvg in the folder ``tools``."""
    tools = str(Path(tools).absolute())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        play = f"{sys.executable} {Path(__file__).resolve()} play"
        size = ["--cols", str(COLUMNS), "--rows", str(ROWS)]
        record = ["rec", "--quiet", "--overwrite", "--env", "TERM", *size, "--command", play, str(CAST)]
        subprocess.run([f"{tools}/asciinema", *record], cwd=folder, env=_environment(folder), check=True)
    # `--command` is in the header of the cast, and has the folders of this machine.
    header, *events = CAST.read_text(encoding="utf-8").splitlines()
    fields = json.loads(header)
    header = json.dumps({name: fields[name] for name in ("version", "width", "height")})
    CAST.write_text("\n".join([header, *events]) + "\n", encoding="utf-8")
    draw = ["render", str(CAST), str(DRAWING), "-M", str(PAUSE), "-m", "100", "-t", "gjm8"]
    subprocess.run([f"{tools}/termtosvg", *draw], check=True)


def play() -> None:
    """Show a prompt with each command, and run it."""
    for command in COMMANDS:
        print("\033[2J\033[H", end="")
        print(f"\033[1;32m$\033[0m {command}", flush=True)
        time.sleep(1)
        # `scan` and `audit` answer 1 if a bug is hit.
        code = subprocess.run(["bash", "-c", command], check=False).returncode
        if code not in (0, 1):
            raise RuntimeError(f"{command}: exit code {code}")
        time.sleep(PAUSE / 1000)


def write_inputs(folder: Path) -> None:
    sys.path.insert(0, str(CHECKOUT / "tests"))
    import tiny

    tiny.llama(str(folder / "made"), seed=0).save_pretrained(folder / "model")
    tokenizer = tiny.tokenizer()
    # As many do whose model has no padding token.
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"text": f"w{row} w{row + 1} w{row + 2} <eos>"}) for row in range(16)]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the commands: nothing of this machine's own settings, and no warnings of libraries."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    terminal = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "SHELL": "/bin/bash"}
    return {"PATH": path, "HOME": str(folder), "DS_ACCELERATOR": "cpu", **quiet, **offline, **terminal}


if __name__ == "__main__":
    play() if sys.argv[1] == "play" else main(sys.argv[1])
