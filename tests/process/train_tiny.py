"""Two steps of a tiny DPO run, on as many ranks as the launcher makes: its log history, from rank 0.

    python train_tiny.py OUT.json FOLDER

``ONLY_RANK_1`` holds ``NAME=VALUE`` pairs, separated by spaces, that the
second rank has in its environment and the others have not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ.get("RANK") == "1" and "ONLY_RANK_1" in os.environ:
    # The hook has run at the start of this interpreter: the rank begins again with its own environment.
    its = dict(pair.split("=", 1) for pair in os.environ.pop("ONLY_RANK_1").split())
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **its})

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(out: str, folder: str, *words: str) -> None:
    from trl import DPOConfig, DPOTrainer

    import tiny

    policy, reference = (tiny.llama(folder, seed=seed) for seed in (0, 1))
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
    if "by-hand" in words:
        import trl_hotfix

        trainer.add_callback(trl_hotfix.HotfixCallback())
    trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-1" if "resume" in words else None)
    if trainer.state.is_world_process_zero:
        Path(out).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if "RANK" in os.environ:
        # A thread of Gloo that still holds a tensor aborts a rank whose Python ends, now and then; to leave the group
        # first can hang (pytorch, pull request 179291).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
