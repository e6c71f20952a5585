"""Note what trainers are made with, beside the patches that are on: which bugs a run hits depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from .breaker import Breaker
from .module_patch import ModulePatch
from .sites import OccupiedError, Site, Sites
from .wrappers import Layer, UnsupportedTargetError

NOTES_ARGUMENTS = "trl-hotfix-arguments"
"""The layer that notes the arguments. It is not a patch: it changes nothing, and no report names it."""


def note_constructors(module_patch: ModulePatch, located: Iterable[Site], sites: Sites, roll_back: ExitStack) -> None:
    """Put the layer on the constructor of each trainer class that the sites in ``located`` are of.

    ``roll_back`` gets the undoing, for an error half-way.
    """
    constructors = [site for site in map(sites.constructor_of, located) if site is not None]
    for site in dict.fromkeys(constructors):
        # Where other code stands in its place, a trainer is known by its config and by what it has.
        with suppress(OccupiedError, UnsupportedTargetError):
            if not site.has(NOTES_ARGUMENTS):
                roll_back.callback(_take_off, site)
                breaker = Breaker("what a trainer is made with")
                site.put_on(Layer(NOTES_ARGUMENTS, 1, _never_called, traced=False, breaker=breaker, observe=True))
            if site not in module_patch.constructors:
                roll_back.callback(_forget, module_patch, site)
                module_patch.constructors.append(site)


def forget_constructor(module_patch: ModulePatch, site: Site, others: Iterable[ModulePatch] = ()) -> None:
    """Leave a constructor to the ``others`` that have it, or put TRL's own back. What other code has put on stays."""
    _forget(module_patch, site)
    if not any(site in other.constructors for other in others):
        _take_off(site)


def _forget(module_patch: ModulePatch, site: Site) -> None:
    module_patch.constructors = [other for other in module_patch.constructors if other is not site]


def _take_off(site: Site) -> None:
    with suppress(OccupiedError):
        site.take_off(NOTES_ARGUMENTS)


def _never_called(*arguments: Any) -> Any:
    raise NotImplementedError("a layer that observes calls TRL's own function")
