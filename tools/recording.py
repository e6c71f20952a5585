"""Draw the whole way in a terminal: scan, verify, train with the repairs, status, audit, compare.

``make recording`` runs it, for each release of trl_hotfix. It writes ``docs/recording.svg``: each command with its real
output, on the TRL that is installed, with a tiny model and no network.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

CHECKOUT = Path(__file__).parents[1]
DRAWING = CHECKOUT / "docs" / "recording.svg"
COLUMNS = 80
NOT_NEEDED = (
    # The fonts come from the network. The reader's own will do.
    r"@font-face \{[^}]*\}\s*",
    # Each line has an area that cuts it off, and its end is a text.
    r'<clipPath id="recording-line-\d+">[^/]*/>\s*</clipPath>\s*',
    r' clip-path="url\(#recording-line-\d+\)"',
    r"<text[^>]*>\n</text>",
)
"""Parts of rich's picture, which are half of it."""

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
    # The lines of other libraries would be more than the answer.
    "trl-hotfix verify sft-eos-masked-when-pad-is-eos 2> log",
    "TRL_HOTFIX=1 python train.py",
    "trl-hotfix status output_dir/",
    "trl-hotfix audit output_dir/",
    "trl-hotfix compare 0.16.1 1.16.0 train.py",
)


def main() -> None:
    """Run the commands one after the other, and draw what they print."""
    # A console draws what it has printed.
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), command))
            console.print(Text.from_ansi(f"{run(command, folder).rstrip()}\n"))
    drawn = console.export_svg(title="trl-hotfix", unique_id="recording")
    for pattern in NOT_NEEDED:
        drawn = re.sub(pattern, "", drawn)
    DRAWING.write_text(drawn, encoding="utf-8", newline="\n")


def run(command: str, folder: Path) -> str:
    """Return what a command prints, with its colours."""
    process = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # `scan` and `audit` answer 1 if a bug is hit.
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{command}: exit code {process.returncode}: {process.stdout}")
    return process.stdout


def write_inputs(folder: Path) -> None:
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
    # The commands print as in a terminal of this width, and in the order of their lines.
    terminal = {"TERM": "xterm-256color", "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
    terminal |= {"LANG": "C.UTF-8", "SHELL": "/bin/bash", "PYTHONPATH": str(CHECKOUT)}
    return {"PATH": path, "HOME": str(folder), "DS_ACCELERATOR": "cpu", **quiet, **offline, **terminal}


if __name__ == "__main__":
    main()
