"""Train two steps of a tiny DPO run, on all ranks of the launcher; rank 0 saves the log history.

    python train_tiny.py OUT.json FOLDER

``ONLY_RANK_1`` holds ``NAME=VALUE`` pairs, separated by spaces, for the environment of the second rank only.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if os.environ.get("RANK") == "1" and "ONLY_RANK_1" in os.environ:
    # The hook has run at the start of this interpreter, so the rank starts again with its own environment.
    variables = dict(pair.split("=", 1) for pair in os.environ.pop("ONLY_RANK_1").split())
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


def main(out: str, folder: str, *options: str) -> None:
    from trl import DPOConfig, DPOTrainer

    import tiny

    # A folder for each rank: no rank reads a model while another still writes it.
    with tempfile.TemporaryDirectory() as models:
        policy, reference = (tiny.llama(models, seed=seed) for seed in (0, 1))
    settings: dict[str, Any] = {"max_length": 16, "max_prompt_length": 8, "max_steps": 2, "output_dir": f"{folder}/out"}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    settings |= json.loads(os.environ.get("SETTINGS", "{}"))
    trainer = tiny.trainer(
        DPOTrainer,
        model=policy,
        ref_model=reference,
        args=tiny.config(DPOConfig, **settings),
        train_dataset=tiny.preferences(),
        tokenizer=tiny.tokenizer(),
    )
    if "by-hand" in options:
        import trl_hotfix

        trainer.add_callback(trl_hotfix.HotfixCallback())
    trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-1" if "resume" in options else None)
    if trainer.state.is_world_process_zero:
        Path(out).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if "RANK" in os.environ:
        # A thread of Gloo that still holds a tensor sometimes aborts a rank whose Python ends; leaving the group first
        # can hang (pytorch, pull request 179291).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
