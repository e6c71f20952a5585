from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix import witness
from trl_hotfix.catalogue import loading, modules
from trl_hotfix.import_hooks import FINDER
from trl_hotfix.matching import fingerprints
from trl_hotfix.model import Called, Patch, Severity, Target, Upstream
from trl_hotfix.patching import conflicts, engine

from helpers import trl_like as made_up

Declare = Callable[..., Patch]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Objects that go only with the garbage collector are as good as alive: it may not run for many steps."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    """Freeze what is imported by now: each report searches the objects of the garbage collector, here for 80 ms."""
    gc.freeze()


@pytest.fixture
def fresh_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Engine]:
    """A new engine, without counts of calls, which reverts all patches after the test."""
    for name in ("TRL_HOTFIX", "TRL_HOTFIX_ONLY", "TRL_HOTFIX_SKIP", "TRL_HOTFIX_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    fresh = engine.Engine()
    monkeypatch.setattr(engine, "ENGINE", fresh)
    monkeypatch.setattr(witness, "_all", {})
    monkeypatch.setattr(witness, "_ledgers", witness._Ledgers())
    for doing in witness.PROCESS.by_phase.values():
        monkeypatch.setattr(doing, "counts", {})
    transformers_trainer = sys.modules.get("transformers.trainer")
    if transformers_trainer is not None:
        monkeypatch.setattr(transformers_trainer, "DEFAULT_CALLBACKS", list(transformers_trainer.DEFAULT_CALLBACKS))
    yield fresh
    fresh.revert(())
    FINDER.forget("transformers.trainer")


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine) -> Declare:
    """Add a patch to the catalogue, of the real DPOTrainer by default, with this self-test and this wrapper.

    ``called`` has the moment of each attribute.
    """
    declared: list[Patch] = []
    monkeypatch.setattr(loading, "load", lambda: tuple(declared))
    monkeypatch.setattr(
        fingerprints,
        "bodies",
        lambda: SimpleNamespace(
            verdict=lambda *arguments: "buggy", at=lambda *arguments: None, has_buggy=lambda *arguments: True
        ),
    )

    def declare_patch(
        self_test: Callable[..., Any],
        wrapper: Callable[..., Any],
        *,
        id: str = "made-up",
        attribute: str = "DPOTrainer.dpo_loss",
        trl: str = ">=0.9.6",
        traced: bool = False,
        module: str = "trl.trainer.dpo_trainer",
        called: Sequence[Called | None] = (),
        **fields: Any,
    ) -> Patch:
        code = ModuleType(modules.module_of(id))
        code.wrapper, code.self_test = wrapper, self_test  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, code.__name__, code)
        targets = tuple(
            Target(module, name, "wrapper", traced=traced, called=moment)
            for name, moment in itertools.zip_longest(attribute.split(), called)
        )
        patch = Patch(
            id=id,
            revision=1,
            title="a made-up patch",
            trl=trl,
            upstream=Upstream(),
            why="",
            how="",
            targets=targets,
            self_test="self_test",
            **{"severity": Severity.WRONG_LOSS, **fields},
        )
        declared.append(patch)
        return patch

    return declare_patch


@pytest.fixture
def trl_like(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_engine: engine.Engine) -> Iterator[made_up.TrlLike]:
    """A made-up module ``trl.trainer.made_up_trainer``, whose code counts as TRL's."""
    import trl.trainer

    folder = tmp_path / "trl"
    folder.mkdir()
    path = folder / "made_up_trainer.py"
    is_of_trl = conflicts.is_of_trl
    monkeypatch.setattr(
        conflicts, "is_of_trl", lambda function: function.__code__.co_filename == str(path) or is_of_trl(function)
    )
    monkeypatch.setattr(trl.trainer, "__path__", [*trl.trainer.__path__, str(folder)])
    # A file that is edited within a second, and keeps its size, would be taken from the cache.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield made_up.TrlLike(path)
    fresh_engine.revert(())
    sys.modules.pop(made_up.NAME, None)
    vars(trl.trainer).pop(made_up.NAME.rpartition(".")[2], None)
