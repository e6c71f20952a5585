"""The figures that scripts write into pages are those of the last measurement."""

from __future__ import annotations

import pytest

from tools import marked, proof_costs


def test_the_tables_of_what_proof_costs_are_those_of_the_benchmark() -> None:
    text = proof_costs.PAGE.read_text(encoding="utf-8")
    assert text == marked.replaced(text, "tables", proof_costs.tables()), "python -m tools.proof_costs"


def test_a_block_is_replaced_and_the_rest_of_the_page_stays() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    assert marked.replaced(page, "x", "new\n") == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"


@pytest.mark.parametrize("page", ["a\n", "<!-- begin x -->\n<!-- end x -->\n" * 2, "<!-- begin x -->\n"])
def test_a_page_without_just_one_such_block_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match=r"expected one block '<!-- begin x -->' \.\.\. '<!-- end x -->', found [02]"):
        marked.replaced(page, "x", "new\n")
