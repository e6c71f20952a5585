"""A few places that together have every patch: for what is true of a patch on any release that has its bug."""

from __future__ import annotations

from trl_hotfix.catalogue import loading

from bench.releases import layout

SURROUNDINGS_OVERLAY = "deepspeed"
"""One of the surroundings is ZeRO-3."""


def covering(first: layout.Place, *overlays: str) -> dict[layout.Place, set[str]]:
    """Return ``first`` and a few other places, with the ids of the patches of each.

    Patches that need more than a stack and these overlays have are on none.
    """
    places = layout.places()
    ids_by_place = {
        place: {patch.id for patch in loading.load() if place.targets_beside(patch, *overlays)} for place in places
    }
    chosen = {first: ids_by_place[first]}
    while missing := set().union(*ids_by_place.values()) - set().union(*chosen.values()):
        best = max(places, key=lambda place: len(ids_by_place[place] & missing))
        chosen[best] = ids_by_place[best]
    return chosen


def of_surroundings() -> dict[layout.Place, set[str]]:
    """Return the places of ``test_surroundings``: the newest release, and others."""
    return covering(layout.places()[-1], SURROUNDINGS_OVERLAY)


def of_pickles() -> dict[layout.Place, set[str]]:
    """Return the places of ``test_pickles``: 0.16.1, where it adds made-up patches, and others."""
    return covering(layout.main_place("0.16.1"))
