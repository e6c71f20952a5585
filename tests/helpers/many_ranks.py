"""Ranks as threads of one process, with a store between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def together(
    monkeypatch: pytest.MonkeyPatch, world: int, ranks: Mapping[int, Callable[[], Any]], patience: str = "20"
) -> dict[int, Any]:
    """Return what each of these ranks returns. A rank without a function takes no part."""
    import torch.distributed

    from trl_hotfix.recording import ranks as module

    store, this = torch.distributed.HashStore(), threading.local()
    found: dict[int, Any] = {}
    monkeypatch.setattr(module, "rank_and_world", lambda: (this.rank, world))
    monkeypatch.setattr(module, "_store", lambda prefix: torch.distributed.PrefixStore(prefix, store))
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", patience)

    def run(rank: int) -> None:
        this.rank = rank
        found[rank] = ranks[rank]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
