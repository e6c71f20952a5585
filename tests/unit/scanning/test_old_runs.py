"""What an old run tells of itself; its pickle is read, and never run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix import __version__
from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.errors import ScriptError
from trl_hotfix.scanning.inert_pickles import read_arguments
from trl_hotfix.scanning.old_runs import read_run

from helpers.old_runs import output_folder


class Harmful:
    """A pickle of it would write a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "harm")


def test_versions_trainer_and_arguments_are_read(tmp_path: Path) -> None:
    folder = output_folder(
        tmp_path / "out", beta=0.5, padding_free=True, loss_type=["ipo"], deepspeed=None, kwargs={"a": 1}
    )
    run = read_run(folder)
    assert run.versions == {"trl": "0.16.1", "transformers": "4.50.3", "torch": "2.6.0"}
    assert (run.trainer, run.repaired, run.has_adapter) == ("DPO", None, False)
    assert run.argument("beta") == Argument(Kind.LITERAL, 0.5, may_be_default=True)
    assert run.argument("loss_type").value == ["ipo"]
    assert run.argument("deepspeed").kind is run.argument("peft_config").kind is Kind.UNSET
    assert run.argument("kwargs.a").value == 1
    assert run.argument("kwargs.b").kind is run.argument("beta.x").kind is Kind.UNSET
    assert run.argument("ref_model").kind is Kind.UNKNOWN
    (folder / "adapter_config.json").write_text("{}")
    assert read_run(folder).argument("peft_config").kind is Kind.OBJECT


def test_a_checkpoint_is_read_with_the_folder_around_it(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", beta=0.5)
    record = {"trl": "0.16.0", "patches": [{"id": "a", "revision": 1, "word": "repaired"}, {"id": "b", "revision": 1}]}
    for step in (9, 10):
        (folder / f"checkpoint-{step}").mkdir()
    (folder / "checkpoint-10" / "trl_hotfix.json").write_text(json.dumps(record))
    for path in (folder, folder / "checkpoint-10"):
        run = read_run(path)
        assert run.repaired == {"a": "repaired", "b": "selected"}
        assert run.versions["trl"] == "0.16.0"
        assert run.trainer == "DPO"
    (folder / "checkpoint-10" / "trl_hotfix.json").write_text("[]")
    with pytest.raises(ScriptError, match="it has no object, but a list; expected"):
        read_run(folder)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Harmful(target)))
    arguments = read_arguments(tmp_path / "training_args.bin")
    assert arguments.made_by.endswith(("write_text", "getattr"))
    assert not target.exists()
    assert read_run(tmp_path).trainer is None


def test_arguments_that_torch_has_saved_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(str(tmp_path), learning_rate=0.25, use_cpu=True, save_strategy="epoch")
    torch.save(args, tmp_path / "new.bin")
    torch.save(args, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("new.bin", "old.bin"):
        arguments = read_arguments(tmp_path / name)
        assert arguments.made_by == "transformers.training_args.TrainingArguments"
        assert arguments.state["learning_rate"] == 0.25
        assert arguments.state["save_strategy"].given == ("epoch",)


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps(1), pickle.dumps({"a": 1}), b"\x80\x04."])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "training_args.bin").write_bytes(content)
    with pytest.raises(ScriptError, match="has no arguments of a training"):
        read_run(tmp_path)


def test_an_empty_folder_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="expected the output folder of a run, or a checkpoint"):
        read_run(tmp_path)


HIT = {"id": "a", "answer": "hit", "severity": "crash", "symptom": "it\x1b[31m crashes", "because": ["beta=0 \x07"]}


def recorded(folder: Path, **record: Any) -> dict[str, str]:
    """Return the answers of a record by their bugs."""
    output_folder(folder)
    (folder / "trl_hotfix.json").write_text(json.dumps({"trl": "0.16.1", "trl_hotfix": __version__, **record}))
    return {name: hit.answer for name, hit in read_run(folder).hits.items()}


def test_what_a_record_says_of_hits_is_read(tmp_path: Path) -> None:
    observed = {"id": "b", "answer": "not hit", "severity": "crash", "called": {"x": 1}}
    assert recorded(tmp_path, hits=[HIT], observed=[observed]) == {"a": "hit", "b": "not hit"}
    (hit, _) = read_run(tmp_path).hits.values()
    assert all(text.isprintable() for text in (hit.symptom, *hit.because))


def test_a_bug_that_was_looked_at_and_is_not_listed_was_none(tmp_path: Path) -> None:
    words = ("repaired", "called", "standing by", "selected", None)
    patches = [{"id": str(word), "revision": 1, "word": word} for word in words]
    looked_at = dict.fromkeys(("repaired", "called", "standing by"), "not hit")
    assert recorded(tmp_path, hits=[], patches=patches) == looked_at
    assert recorded(tmp_path, hits=[{**HIT, "id": "called"}], patches=patches) == {**looked_at, "called": "hit"}
    # Nobody asked, or it was asked with the conditions of another version.
    assert recorded(tmp_path, patches=patches) == {}
    assert recorded(tmp_path, hits=[HIT], patches=patches, trl_hotfix="0.0.1") == {"a": "hit"}


@pytest.mark.parametrize("hits", [3, [3], [{"id": "a"}], [{**HIT, "answer": "maybe"}], [{**HIT, "because": 1}], "hit"])
def test_hits_of_no_known_form_are_one_clear_error(tmp_path: Path, hits: Any) -> None:
    with pytest.raises(ScriptError, match=r"trl_hotfix\.json is no record of a run: in its hits: "):
        recorded(tmp_path, hits=hits)
