"""The handler for programs that configure no logging."""

from __future__ import annotations

import logging

import pytest

from trl_hotfix.log import _FallbackHandler


@pytest.mark.parametrize("rank", ["%(nope)s", "5%", "0\n", "1]\x1b[31m", "x"])
def test_a_rank_that_is_no_number_is_left_out(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord("trl_hotfix", logging.INFO, "", 0, "said", None, None)
    assert _FallbackHandler().format(record) == "trl_hotfix: INFO: said"
