"""A report in a terminal, or piped."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from trl_hotfix.model import Reason, State
from trl_hotfix.reporting import table
from trl_hotfix.reporting.report import PatchStatus, Report

from helpers.patch_examples import PATCH


def test_a_piped_table_has_whole_ids_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    patch = replace(PATCH, id="a-long-id-" * 9, title="[bold]brackets[/bold]")
    evidence = {"installed": "0.11.4", "range": patch.trl}
    report = Report("0.1", "0.11.4", "3.11.7", (PatchStatus(patch, State.PENDING, Reason.APPLIES, evidence, ()),))
    table.show(table.table(report))
    output = capsys.readouterr().out
    assert patch.id in output
    assert "crash: [bold]brackets[/bold]" in output
    assert "applies: TRL 0.11.4 has this bug" in output
    assert "\x1b" not in output
    assert all(line == line.rstrip() for line in output.splitlines())
