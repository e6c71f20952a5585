"""Run inside one release: train in a process as TRL_HOTFIX=observe starts it, or in an unpatched one.

    python -m bench.inside.observing OUT.json unpatched|observe|repair CASE...

A case is a trainer, ``DPO``, or a trainer with settings, ``GRPO steps_per_generation=4``. Each is trained for two
optimizer steps in a fork with a folder of its own. Its answer has all numbers of the run, and under observe and repair
the bugs that the run was said to hit; it is a text, the reason, if there was no run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

SECONDS_A_CASE = 180
TIMES = ("runtime", "per_second", "step_time", "eps")
"""What the names of the metrics end with that are measured with a clock."""


def trained(name: str, settings: dict[str, Any], mode: str) -> dict[str, Any]:
    from bench.inside import trainers

    # A folder with a random name, or the time in the name of the default one, would change the fingerprints.
    folders = {"output_dir": "output", "logging_dir": "logs"}
    usual = {"max_steps": 2, "gradient_accumulation_steps": 2, "seed": 7, **folders}
    trainer = trainers.TRAINERS[name](**{**usual, **settings})
    # PPO and its like look at the model before they train.
    observed = said(trainer) if mode == "observe" else {}
    trainer.train()
    return {
        "history": [without_times(entry) for entry in trainer.state.log_history],
        "parameters": digest_of_parameters(trainer.model),
        "random": digests_of_random_states(),
        "fingerprints": [getattr(data, "_fingerprint", None) for data in (trainer.train_dataset, trainer.eval_dataset)],
        "observed": observed,
        "called": calls(trainer) if mode == "observe" else {},
        "hits": hits(trainer),
    }


def said(trainer: Any) -> dict[str, str]:
    """Return the answer about each bug that is observed."""
    import trl_hotfix
    from trl_hotfix.recording import observation

    return {one.id: one.answer.value for one in observation.findings(trainer, trl_hotfix.status())}


def hits(trainer: Any) -> dict[str, str]:
    """Return what was said of each bug when training began, which is in the record of the run."""
    from trl_hotfix.recording.trackers import KEY

    records = [entry[KEY] for entry in trainer.state.log_history if KEY in entry]
    return {hit["id"]: hit["answer"] for record in records for hit in record.get("hits", ())}


def calls(trainer: Any) -> dict[str, int]:
    import trl_hotfix
    from trl_hotfix.recording import observation

    return {one.id: sum(one.called.values()) for one in observation.findings(trainer, trl_hotfix.status())}


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    from trl_hotfix.recording.trackers import KEY

    return {key: repr(value) for key, value in entry.items() if key != KEY and not key.endswith(TIMES)}


def digest_of_parameters(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def digests_of_random_states() -> dict[str, str]:
    import numpy
    import torch

    states = {"torch": torch.get_rng_state().tolist(), "random": random.getstate(), "numpy": numpy.random.get_state()}
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}


def run(case: str, mode: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    # In a fork Python draws a seed for it. PPO and RLOO of 0.11.4 set none.
    random.seed(0)
    name, _, text = case.partition(" ")
    pairs = (pair.partition("=") for pair in text.split())
    return trained(name, {key: ast.literal_eval(value) for key, _, value in pairs}, mode)


def main(out: str, mode: str, *cases: str) -> None:
    if mode != "unpatched":
        from trl_hotfix import autostart

        os.environ["TRL_HOTFIX"] = "observe" if mode == "observe" else "1"
        autostart.start()
    import numpy
    import torch

    # A self-test that draws a number would show in every run that does not set a seed of its own at once.
    numpy.random.seed(0)
    torch.manual_seed(0)
    from bench.inside import trainers
    from bench.proving import release

    answers: dict[str, Any] = {}
    for case in cases:
        if trainers.is_available(case.partition(" ")[0]):
            answers[case] = release.alone(functools.partial(run, case, mode), SECONDS_A_CASE)
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The hashes of `datasets` depend on the order of sets.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    main(*sys.argv[1:])
