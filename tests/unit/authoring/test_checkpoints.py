"""What a callback keeps beside a checkpoint is found by the run that is resumed from it, and by no other."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.authoring import is_sharded, keep_beside_checkpoint, kept_beside_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

STATE = SimpleNamespace(global_step=3)
NAME = "kept.safetensors"


def model(scale: float = 1.0) -> Any:
    linear = torch.nn.Linear(20, 10)
    for parameter in linear.parameters():
        parameter.data = scale * torch.arange(parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)
    return linear


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    (tmp_path / "checkpoint-3").mkdir()
    return SimpleNamespace(output_dir=str(tmp_path), should_save=True, resume_from_checkpoint=None)


def test_what_is_kept_is_found_with_the_same_weights(args: SimpleNamespace) -> None:
    tensors = {"one": torch.tensor([1.0, 2.0]), "other": torch.eye(2, dtype=torch.bfloat16).T}
    keep_beside_checkpoint(args, STATE, NAME, model(), tensors)
    kept = kept_beside_checkpoint(args, STATE, NAME, model())
    assert kept is not None
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[name], value) and kept[name].dtype is value.dtype for name, value in tensors.items())


def test_it_is_not_found_with_other_weights_or_at_another_step(args: SimpleNamespace) -> None:
    keep_beside_checkpoint(args, STATE, NAME, model(), {"one": torch.ones(1)})
    assert kept_beside_checkpoint(args, STATE, NAME, model(1.5)) is None
    assert kept_beside_checkpoint(args, STATE, NAME, torch.nn.Linear(20, 10, bias=False)) is None
    assert kept_beside_checkpoint(args, SimpleNamespace(global_step=4), NAME, model()) is None


def test_the_named_checkpoint_comes_first(args: SimpleNamespace, tmp_path: Path) -> None:
    keep_beside_checkpoint(args, STATE, NAME, model(), {"one": torch.ones(1)})
    elsewhere = SimpleNamespace(output_dir=str(tmp_path / "new"), resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert kept_beside_checkpoint(elsewhere, STATE, NAME, model()) is not None
    elsewhere.resume_from_checkpoint = True
    assert kept_beside_checkpoint(elsewhere, STATE, NAME, model()) is None


def test_nothing_is_written_by_other_ranks_or_without_a_checkpoint(args: SimpleNamespace, tmp_path: Path) -> None:
    args.should_save = False
    keep_beside_checkpoint(args, STATE, NAME, model(), {})
    args.should_save = True
    keep_beside_checkpoint(args, SimpleNamespace(global_step=4), NAME, model(), {})
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-3"]


def test_what_cannot_be_written_is_a_warning(args: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trl_hotfix"):
        logging.getLogger("trl_hotfix").addHandler(caplog.handler)
        try:
            keep_beside_checkpoint(args, STATE, "no such folder/kept", model(), {})
        finally:
            logging.getLogger("trl_hotfix").removeHandler(caplog.handler)
    assert "cannot be written" in caplog.text


def test_a_damaged_file_is_not_found(args: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3" / NAME).write_bytes(b"half a file")
    assert kept_beside_checkpoint(args, STATE, NAME, model()) is None


def test_parts_of_parameters_are_recognized() -> None:
    whole, zero, wrapped = model(), model(), model()
    zero.weight.ds_id = 1
    wrapped.inner = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    assert [is_sharded(sharded) for sharded in (whole, zero, wrapped)] == [False, True, True]
