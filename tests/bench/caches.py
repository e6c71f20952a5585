"""Run inside one release: which files of the ``datasets`` cache a real trainer takes from before, and which it makes.

    python caches.py OUT.json FOLDER dpo|sft TARGET [INDIRECT]

TARGET (``module:attribute``) is a function that prepares data, INDIRECT one that such a function calls. The trainer is
made in a fork for each case, over the same dataset on disk; each answers the cache files that it has made, and how many
rows of the trainer's dataset have the mark of the patch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import prove
import release


def a_trainer(folder: Path, kind: str, workers: int | None) -> Any:
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
    wanted: dict[str, Any] = {"model": tiny.llama(str(folder), seed=0), "tokenizer": tiny.tokenizer()}
    wanted["tokenizer"].bos_token = "<unk>"
    if kind == "dpo":
        wanted["ref_model"] = tiny.llama(str(folder), seed=1)
    its, config = (trl.DPOTrainer, trl.DPOConfig) if kind == "dpo" else (trl.SFTTrainer, trl.SFTConfig)
    data = load_from_disk(str(folder / "data"))
    return tiny.trainer(its, args=tiny.config(config, **settings), train_dataset=data, **wanted)


def one(folder: Path, kind: str, patch: Callable[[], None], workers: int | None = None) -> dict[str, Any]:
    if workers:
        folder /= "workers"  # what one process has made is found by two
    before = {each.name for each in folder.rglob("cache-*.arrow")}
    patch()
    rows = list(a_trainer(folder, kind, workers).train_dataset)
    made = {each.name for each in folder.rglob("cache-*.arrow")} - before
    marked = [row for row in rows if any(name in row and row[name][-1] == made_up.MARK for name in made_up.IDS)]
    return {"made": sorted(made), "rows": len(rows), "marked": len(marked)}


def main(out: str, folder: str, kind: str, target: str, indirect: str = "") -> None:
    from trl import DPOTrainer, SFTTrainer  # noqa: F401

    import trl_hotfix
    from trl_hotfix.catalogue import loading

    def of(where: str) -> Callable[[], None]:
        def patch() -> None:
            made_up.declare("made-up-data", *where.split(":"))
            report = trl_hotfix.apply(only=["made-up-data"], unknown_body="try", strict=True)
            assert report.ok, report

        return patch

    data = [each.id for each in loading.load() if getattr(prove.proof_of(each.id), "DATA", False)]
    cases: dict[str, tuple[Any, ...]] = {
        "unpatched": (lambda: None,),
        "all others of the catalogue": (lambda: print(trl_hotfix.apply(skip=data, strict=True)),),
        "data patch": (of(target),),
        "data patch, two workers": (of(target), 2),
    }
    if indirect:
        cases["a function that it calls"] = (of(indirect),)
    work: Any = lambda case: one(Path(folder), kind, *case)  # noqa: E731
    answer = {name: release.in_a_fork(work, case, 120) for name, case in cases.items()}  # type: ignore[arg-type]
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
