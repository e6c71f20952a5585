"""``load_dataset``: the rows of files as they are, those of the hub from its cache, from a file, or a few online."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .rows import SEEN
from .small_folders import NotHereError

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}

SPLITS = ("train", "test", "validation")


def install(files: Mapping[str, str], taken: list[str], *, online: bool, whole: bool) -> None:
    """Have ``load_dataset`` answer with few rows."""
    import datasets

    original = datasets.load_dataset

    @functools.wraps(original)
    def load_dataset(path: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(path)
        if name in files:
            return _of_file(original, files[name], kwargs)
        is_here = name in ("json", "csv", "parquet", "text", "arrow", "generator", "pandas") or Path(name).exists()
        if not is_here and online:
            return _few(original, path, args, kwargs)
        for each in ("trust_remote_code", "num_proc"):
            kwargs.pop(each, None)
        try:
            found = original(path, *args, **kwargs)
        except (OSError, ValueError) as error:
            # transformers and datasets say in many ways that the hub cannot be reached.
            if is_here:
                raise
            raise NotHereError(
                f"the rows of {name!r} are not on this machine; expected them in the cache of datasets. "
                f"--rows {name}=FILE gives a file with some of them, and --online reads a few from the hub"
            ) from error
        return found if whole else first(found, taken, name)

    datasets.load_dataset = load_dataset
    datasets.load.load_dataset = load_dataset


def first(found: Any, taken: list[str], name: str) -> Any:
    """Return a dataset with its first rows, if it has many."""
    from datasets import Dataset, DatasetDict

    if isinstance(found, DatasetDict):
        return DatasetDict({split: first(rows, taken, f"{name}, {split}") for split, rows in found.items()})
    if isinstance(found, Dataset) and len(found) > SEEN:
        taken.append(f"the first {SEEN} of {len(found):,} rows of {name}")
        return found.select(range(SEEN))
    return found


def _of_file(original: Any, file: str, kwargs: Mapping[str, Any]) -> Any:
    from datasets import DatasetDict

    reader = READERS.get(Path(file).suffix)
    if reader is None:
        raise NotHereError(f"--rows: {file}: expected a file that ends with {', '.join(READERS)}")
    rows = original(reader, data_files=file, split="train")
    if kwargs.get("streaming"):
        rows = rows.to_iterable_dataset()
    split = kwargs.get("split")
    if split is not None:
        return [rows for _ in split] if isinstance(split, list) else rows
    return DatasetDict(dict.fromkeys(SPLITS, rows))


def _few(original: Any, path: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a few rows of the hub. They are read as a stream, which writes nothing."""
    from datasets import Dataset, DatasetDict, IterableDataset

    is_stream = kwargs.pop("streaming", False)
    split = kwargs.get("split")
    if isinstance(split, str):
        kwargs["split"] = split.partition("[")[0]
    found = original(path, *args, **{**kwargs, "streaming": True})

    def few(rows: IterableDataset) -> Any:
        return rows.take(SEEN) if is_stream else Dataset.from_list(list(itertools.islice(rows, SEEN)))

    if isinstance(found, Mapping):
        return DatasetDict({name: few(rows) for name, rows in found.items()})
    return few(found)
