"""Versions and ranges are compared as ``packaging`` does it."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl_hotfix.matching import versions

from helpers.patch_examples import RELEASES, some_release


@pytest.mark.parametrize(
    ("version", "specifiers", "inside"),
    [
        ("0.11.4", ">=0.11.0,<0.12.0", True),
        ("0.12.0", ">=0.11.0,<0.12.0", False),
        ("0.10.1", ">=0.11.0,<0.12.0", False),
        ("1.0.0rc1", ">=0.29.0,<1.1.0", True),
        ("1.0.0rc1", ">=1.0.0", False),
        ("1.0.0rc1", ">=1.0.0rc1", True),
        ("1.0.0rc1", "<1.0.0", False),
        ("0.11.4+cu124", ">=0.11.0,<0.12.0", True),
        ("0.11.4+cu124", "<=0.11.4", True),
        ("0.11.4+cu124", "==0.11.4", True),
        ("0.12.0+local.1", "<0.12.0", False),
        ("0.11.4.post1", ">=0.11.4,<0.12.0", True),
        ("1.10.0", "<1.9", False),
        ("1.10.0", ">=1.9", True),
        ("v0.11.4", "==0.11.4", True),
    ],
)
def test_a_version_is_in_its_range_or_not(version: str, specifiers: str, inside: bool) -> None:
    assert versions.in_range(version, specifiers) is inside


@st.composite
def ranges(draw: st.DrawFn) -> str:
    operators = st.sampled_from([">=", ">", "<", "<=", "==", "!=", "~="])
    parts = draw(st.lists(st.tuples(operators, some_release), max_size=3))
    return ",".join(f"{operator}{version}" for operator, version in parts)


@given(some_release, ranges())
def test_in_range_agrees_with_packaging(version: str, specifiers: str) -> None:
    assert versions.in_range(version, specifiers) == (Version(version) in SpecifierSet(specifiers))


@pytest.mark.parametrize("version", RELEASES)
def test_every_known_release_is_supported(version: str) -> None:
    assert versions.SUPPORTED.contains(version)


def test_a_missing_distribution_has_no_version() -> None:
    assert versions.installed("no-such-distribution-anywhere") is None


def test_an_installed_version_comes_from_its_metadata() -> None:
    names = [distribution.metadata["Name"] for distribution in metadata.distributions()]
    assert {name: versions.installed(name) for name in names} == {name: metadata.version(name) for name in names}
