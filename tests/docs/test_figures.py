"""Scripts write figures into pages."""

from __future__ import annotations

import pytest

from tools import marked, proof_costs


def test_the_page_of_what_proof_costs_has_a_place_for_its_tables() -> None:
    assert proof_costs.PAGE.read_text(encoding="utf-8").count(proof_costs.TABLES_MARK) == 1


def test_the_tables_have_a_row_for_everything() -> None:
    assert "| everything, 300 patches and 100 releases |" in proof_costs.tables()


def test_the_times_are_those_of_the_commands() -> None:
    times = " 1293 s  make test\n           3 s  types\n    9 s  make evidence\n"
    assert proof_costs.of_commands(times) == " 1293 s  make test\n    9 s  make evidence\n"


def test_a_block_is_replaced_and_the_rest_of_the_page_stays() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    assert marked.replaced(page, "x", "new\n") == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"


@pytest.mark.parametrize("page", ["a\n", "<!-- begin x -->\n<!-- end x -->\n" * 2, "<!-- begin x -->\n"])
def test_a_page_without_just_one_such_block_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match=r"expected one block '<!-- begin x -->' \.\.\. '<!-- end x -->', found [02]"):
        marked.replaced(page, "x", "new\n")
