"""Run inside one release: record which files of the ``datasets`` cache a real trainer reuses, and which it makes.

    python -m bench.inside.caches OUT.json FOLDER dpo|sft TARGET [INDIRECT]

TARGET (``module:attribute``) is a function that prepares data, INDIRECT one that such a function calls. In each case
the trainer is made in a fork, on the same dataset on disk. The answer has the cache files that were made, and the
number of rows in the trainer's dataset with the mark of the patch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.inside import made_up
from bench.proving import prove, release


def make_trainer(folder: Path, kind: str, workers: int | None) -> Any:
    import trl
    from datasets import Dataset, load_from_disk

    import tiny

    if not (folder / "data").is_dir():
        rows = tiny.preferences()
        if kind == "sft":
            rows = Dataset.from_dict({"text": rows["chosen"]})
        rows.save_to_disk(folder / "data")
    settings = {
        "max_length": 16,
        "max_prompt_length": 8,
        "dataset_num_proc": workers,
        "output_dir": str(folder / "out"),
    }
    arguments: dict[str, Any] = {"model": tiny.llama(str(folder), seed=0), "tokenizer": tiny.tokenizer()}
    arguments["tokenizer"].bos_token = "<unk>"
    if kind == "dpo":
        arguments["ref_model"] = tiny.llama(str(folder), seed=1)
    trainer_class, config_class = (trl.DPOTrainer, trl.DPOConfig) if kind == "dpo" else (trl.SFTTrainer, trl.SFTConfig)
    data = load_from_disk(str(folder / "data"))
    return tiny.trainer(trainer_class, args=tiny.config(config_class, **settings), train_dataset=data, **arguments)


def run_case(folder: Path, kind: str, patch: Callable[[], None], workers: int | None = None) -> dict[str, Any]:
    if workers:
        folder /= "workers"  # Otherwise two workers find the files of one.
    before = {file.name for file in folder.rglob("cache-*.arrow")}
    patch()
    rows = list(make_trainer(folder, kind, workers).train_dataset)
    new_files = {file.name for file in folder.rglob("cache-*.arrow")} - before
    marked = [row for row in rows if any(name in row and row[name][-1] == made_up.MARK for name in made_up.IDS)]
    return {"made": sorted(new_files), "rows": len(rows), "marked": len(marked)}


def main(out: str, folder: str, kind: str, target: str, indirect: str = "") -> None:
    from trl import DPOTrainer, SFTTrainer  # noqa: F401

    import trl_hotfix
    from trl_hotfix.catalogue import loading

    def apply_to(target_name: str) -> Callable[[], None]:
        def patch() -> None:
            made_up.declare("made-up-data", *target_name.split(":"))
            report = trl_hotfix.apply(only=["made-up-data"], unknown_body="try", strict="all")
            assert report.ok, report

        return patch

    data = [patch.id for patch in loading.load() if getattr(prove.proof_of(patch.id), "DATA", False)]
    cases: dict[str, tuple[Any, ...]] = {
        "unpatched": (lambda: None,),
        "all others of the catalogue": (lambda: print(trl_hotfix.apply(skip=data, strict="all")),),
        "data patch": (apply_to(target),),
        "data patch, two workers": (apply_to(target), 2),
    }
    if indirect:
        cases["a function that it calls"] = (apply_to(indirect),)
    work: Any = lambda case: run_case(Path(folder), kind, *case)  # noqa: E731
    answer = {name: release.in_a_fork(work, case, 120) for name, case in cases.items()}  # type: ignore[arg-type]
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
