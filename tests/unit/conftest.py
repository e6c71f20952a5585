from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import fingerprints
from trl_hotfix.model import Patch, Severity, Target, Upstream
from trl_hotfix.patching import engine

Declare = Callable[..., Patch]


def load_helpers() -> None:
    """Make ``helpers`` importable by the test files: with ``--import-mode=importlib`` pytest leaves sys.path alone."""
    spec = importlib.util.spec_from_file_location("helpers", Path(__file__).parent / "helpers" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["helpers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["helpers"])


load_helpers()


def pytest_collection_finish() -> None:
    """Freeze what is imported by now: each report searches the objects of the garbage collector, here for 80 ms."""
    gc.freeze()


@pytest.fixture
def fresh_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Engine]:
    """A new engine, which reverts all patches after the test."""
    for name in ("TRL_HOTFIX", "TRL_HOTFIX_ONLY", "TRL_HOTFIX_SKIP", "TRL_HOTFIX_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    fresh = engine.Engine()
    monkeypatch.setattr(engine, "ENGINE", fresh)
    yield fresh
    fresh.revert(())


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine) -> Declare:
    """Add a patch of the real DPOTrainer to the catalogue, with this self-test and this wrapper."""
    declared: list[Patch] = []
    monkeypatch.setattr(loading, "load", lambda: tuple(declared))
    monkeypatch.setattr(
        fingerprints, "bodies", lambda: SimpleNamespace(verdict=lambda *arguments: "buggy", at=lambda *arguments: None)
    )

    def declare_patch(
        self_test: Callable[..., Any],
        wrapper: Callable[..., Any],
        *,
        id: str = "made-up",
        attribute: str = "DPOTrainer.dpo_loss",
        trl: str = ">=0.9.6",
        traced: bool = False,
        **fields: Any,
    ) -> Patch:
        module = ModuleType(modules.module_of(id))
        module.wrapper, module.self_test = wrapper, self_test  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        targets = tuple(Target("trl.trainer.dpo_trainer", name, "wrapper", traced=traced) for name in attribute.split())
        patch = Patch(
            id=id,
            revision=1,
            title="a made-up patch",
            severity=Severity.WRONG_LOSS,
            trl=trl,
            upstream=Upstream(),
            why="",
            how="",
            targets=targets,
            self_test="self_test",
            **fields,
        )
        declared.append(patch)
        return patch

    return declare_patch
