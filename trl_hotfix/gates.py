"""May a patch go on? Pure decisions, each with its reason; neither trl nor torch is imported for them."""

from __future__ import annotations

import email
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from typing import NamedTuple

from msgspec import Struct
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import freeze
from .errors import SettingError, UnknownPatchError, suggestion
from .freeze import Frozen
from .model import Decision, Options, Patch, Reason, State, Target
from .packs import find

SUPPORTED = SpecifierSet(">=0.9.6")
"""The TRL releases that the catalogue speaks of; an older one is reported as not supported."""

VersionOf = Callable[[str], "str | None"]


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata; None if it is not installed."""
    try:
        its = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    # `its.version` would read the whole description each time, which is TRL's README.
    text = its.read_text("METADATA") or its.read_text("PKG-INFO") or ""
    version: str | None = email.message_from_string(text.partition("\n\n")[0])["Version"]
    return version or its.version


def installed_but(trl: str) -> VersionOf:
    """What is installed, if it were beside this TRL."""
    return lambda distribution: trl if distribution == "trl" else installed(distribution)


@functools.cache
def in_range(version: str, specifiers: str) -> bool:
    """``version`` is in the PEP 440 range; a pre-release such as 1.0.0rc1 counts as what it is."""
    return SpecifierSet(specifiers).contains(Version(version), prereleases=True)


class Selection(Struct, frozen=True):
    """What the user asked for: only these ids (None: all), and not those; and for some, other options."""

    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    options: Mapping[str, Options] = {}
    frozen: Frozen | None = None
    packs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        only: Iterable[str] | None,
        skip: Iterable[str] | None,
        environment: Mapping[str, str],
        patches: Iterable[Patch],
        options: Mapping[str, Options] | None = None,
        packs: tuple[str, ...] = (),
    ) -> Selection:
        """An argument wins over its variable: ``TRL_HOTFIX_ONLY``, ``TRL_HOTFIX_SKIP``, ``TRL_HOTFIX_OPTIONS``.

        ``only`` may be ``"@file"``: the freeze file decides then, and neither of the others is looked at.

        Raises ``UnknownPatchError`` for an id that none of ``patches`` has, ``SettingError`` for an unknown option or
        choice, and for a freeze file that cannot be applied as it is.
        """
        known = {patch.id: patch for patch in patches}
        file = environment.get("TRL_HOTFIX_ONLY", "").strip() if only is None else only
        if isinstance(file, str) and file.startswith("@"):
            if skip is not None or options is not None:
                raise SettingError(f"only={file!r} applies exactly what the file names: leave skip= and options= out")
            frozen = freeze.read(file[1:], known, {name: find(name).release for name in packs})
            return cls(
                only=frozenset(each.id for each in frozen.patches),
                options={each.id: each.options for each in frozen.patches if each.options},
                frozen=frozen,
                packs=packs,
            )
        return cls(
            only=_ids(only, "only", "TRL_HOTFIX_ONLY", environment, known),
            skip=_ids(skip, "skip", "TRL_HOTFIX_SKIP", environment, known) or frozenset(),
            options=_options(options, environment, known),
            packs=packs,
        )

    def options_of(self, patch: Patch) -> dict[str, str]:
        """Every option of ``patch``, as the user wants it or as it is by default."""
        return patch.chosen(self.options.get(patch.id, {}))


def _ids(
    argument: Iterable[str] | None, name: str, variable: str, environment: Mapping[str, str], known: Collection[str]
) -> frozenset[str] | None:
    where = f"{name}="
    if argument is None:
        argument = [each for each in map(str.strip, environment.get(variable, "").split(",")) if each]
        where = variable
        if not argument:
            return None
    ids = frozenset([argument] if isinstance(argument, str) else argument)
    unknown = {each for each in ids if each not in known}
    if unknown:
        raise UnknownPatchError([str(each) for each in unknown], known, where)
    return ids


def _options(
    argument: Mapping[str, Options] | None, environment: Mapping[str, str], known: Mapping[str, Patch]
) -> Mapping[str, Options]:
    """``{id: {option: choice}}``; in the variable ``id.option=choice``, separated by commas."""
    wanted, where = argument, "options="
    if wanted is None:
        where = "TRL_HOTFIX_OPTIONS"
        split: dict[str, dict[str, str]] = {}
        for each in filter(None, map(str.strip, environment.get(where, "").split(","))):
            name, equals, choice = each.partition("=")
            patch_id, dot, option = name.strip().partition(".")
            if not (equals and dot):
                raise SettingError(f"{where}: expected id.option=choice, found {each!r}")
            split.setdefault(patch_id, {})[option] = choice.strip()
        wanted = split
    unknown = [patch_id for patch_id in wanted if patch_id not in known]
    if unknown:
        raise UnknownPatchError(unknown, known, where)
    for patch_id, choices in wanted.items():
        for option, choice in choices.items():
            its = known[patch_id].options
            if option not in its:
                said = f"; it has {', '.join(its)}" if its else "; it has none"
                said = suggestion(option, its) or said
                raise SettingError(f"{where}: {patch_id} has no option {option!r}{said}")
            if choice not in its[option].choices:
                said = suggestion(str(choice), its[option].choices)
                there = ", ".join(its[option].choices)
                raise SettingError(f"{where}: {patch_id}.{option} is {choice!r}, expected one of {there}{said}")
    return {patch_id: dict(choices) for patch_id, choices in wanted.items()}


def decisions(patches: Iterable[Patch], selection: Selection, version_of: VersionOf = installed) -> dict[str, Decision]:
    """Where the gates leave each patch. What is installed is looked up once."""
    version_of = functools.cache(version_of)
    return {patch.id: decide(patch, selection, version_of) for patch in patches}


def decide(patch: Patch, selection: Selection, version_of: VersionOf = installed) -> Decision:
    """Where the gates leave ``patch``: disabled, retired, skipped, or pending with the reason ``applies``."""
    if patch.id in selection.skip:
        return Decision(State.DISABLED, Reason.EXCLUDED)
    if selection.only is not None and patch.id not in selection.only:
        return Decision(State.DISABLED, Reason.NOT_SELECTED)
    if selection.only is None and not patch.default:
        return Decision(State.DISABLED, Reason.DEFAULT_OFF)
    return applicability(patch, version_of)


def applicability(patch: Patch, version_of: VersionOf = installed) -> Decision:
    """Does ``patch`` belong to what is installed here, whatever the user selected?"""
    trl = version_of("trl")
    if trl is None:
        return Decision(State.SKIPPED, Reason.NO_TRL)
    seen: dict[str, object] = {"installed": trl, "range": patch.trl}
    inside = in_range(trl, patch.trl) and bool(targets_for(patch, trl))
    if not inside and not is_unreleased(trl):
        fixed_in = patch.upstream.fixed_in
        if fixed_in is not None and Version(trl) >= Version(fixed_in):
            return Decision(State.RETIRED, Reason.FIXED_UPSTREAM, {**seen, "fixed_in": fixed_in})
        return Decision(State.SKIPPED, Reason.TRL_VERSION, seen)
    unmet = lacking(patch, version_of)
    if unmet is not None:
        return Decision(State.SKIPPED, Reason.REQUIREMENT, {**seen, **unmet})
    return Decision(State.PENDING, Reason.APPLIES if inside else Reason.BODY_DECIDES, seen)


class Requirement(NamedTuple):
    """A distribution that a patch requires beside TRL, the versions that fit, and what is there."""

    distribution: str
    wanted: str
    found: str | None

    @property
    def met(self) -> bool:
        return self.found is not None and in_range(self.found, self.wanted)


def requirements(patch: Patch, version_of: VersionOf = installed) -> list[Requirement]:
    """What ``patch`` requires, each with what is there."""
    return [Requirement(name, wanted, version_of(name)) for name, wanted in patch.requires.items()]


def lacking(patch: Patch, version_of: VersionOf = installed) -> dict[str, object] | None:
    """The first that ``patch`` requires and that is not there, with what is there instead; None if it has all."""
    for each in requirements(patch, version_of):
        if not each.met:
            return {"requires": f"{each.distribution}{each.wanted}", "found": each.found}
    return None


def targets_for(patch: Patch, trl: str) -> tuple[Target, ...]:
    """The targets of ``patch`` that have the bug in this TRL release."""
    return tuple(target for target in patch.targets if in_range(trl, patch.range_of(target)))


def targets_here(patch: Patch, version_of: VersionOf = installed) -> tuple[Target, ...]:
    """The targets that have the bug beside what is installed here; none if ``patch`` does not belong to it."""
    belongs = applicability(patch, version_of).state is State.PENDING
    return targets_for(patch, version_of("trl") or "") if belongs else ()


def is_unreleased(trl: str) -> bool:
    """A development version or a fork: 1.10.0.dev0 lies in neither <1.10 nor >=1.10, so that its bodies must decide."""
    version = Version(trl)
    return version.is_devrelease or version.local is not None
