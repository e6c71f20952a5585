"""The patches and the options that the user asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..catalogue import loading
from ..catalogue.names import by_name, id_of
from ..catalogue.packs import find
from ..errors import CatalogueError, SettingError, UnknownPatchError, quoted, suggestion
from ..model import Options, Patch
from . import freeze_files
from .freeze_files import Frozen


class Selection(Struct, frozen=True):
    """The user's choice: the ids in ``only`` (None: all), without those in ``skip``, with these ``options``."""

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
        """Return the selection from the arguments or their variables: ``TRL_HOTFIX_ONLY``, ``_SKIP``, ``_OPTIONS``.

        An argument wins over its variable. If ``only`` is ``"@file"``, the freeze file decides alone: there may be no
        ``skip`` and no ``options`` beside it, since one of the two would have to be ignored.

        Raises ``UnknownPatchError`` for an id that none of ``patches`` has or had, ``SettingError`` for an unknown
        option or choice, and for a freeze file that cannot be applied as it is.
        """
        known = by_name(patches)
        file = environment.get("TRL_HOTFIX_ONLY", "").strip() if only is None else only
        if isinstance(file, str) and file.startswith("@"):
            _check_alone("TRL_HOTFIX_ONLY" if only is None else "only", file, skip, options, environment)
            frozen = freeze_files.read(file[1:], known, {name: find(name).release for name in packs})
            entries = {id_of(entry.id, known): entry for entry in frozen.patches}
            return cls(
                only=frozenset(entries),
                options={patch_id: entry.options for patch_id, entry in entries.items() if entry.options},
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
        """Return every option of ``patch``, with the user's choice or else the default."""
        return patch.chosen(self.options.get(patch.id, {}))


def _check_alone(
    source: str,
    file: str,
    skip: Iterable[str] | None,
    options: Mapping[str, Options] | None,
    environment: Mapping[str, str],
) -> None:
    """Raise ``SettingError`` if something beside a freeze file chooses patches or options too."""
    variables = [name for name in ("TRL_HOTFIX_SKIP", "TRL_HOTFIX_OPTIONS") if environment.get(name, "").strip(" ,")]
    arguments = [name for name, argument in (("skip=", skip), ("options=", options)) if argument is not None]
    if variables or arguments:
        others = " and ".join([*arguments, *variables])
        raise SettingError(
            f"{source}={quoted(file)} applies exactly what the file names: leave {others} out. "
            "`trl-hotfix freeze` writes a file that follows TRL_HOTFIX_SKIP and TRL_HOTFIX_OPTIONS"
        )


def _ids(
    argument: Iterable[str] | None, name: str, variable: str, environment: Mapping[str, str], known: dict[str, Patch]
) -> frozenset[str] | None:
    source = f"{name}="
    if argument is None:
        value = environment.get(variable, "").strip()
        argument = [patch_id for patch_id in map(str.strip, value.split(",")) if patch_id]
        source = variable
        if value and not argument and name == "only":
            raise SettingError(f"{source}={quoted(value)} names no patch: unset it if you mean all")
        if not argument:
            return None
    ids = frozenset([argument] if isinstance(argument, str) else argument)
    unknown = {patch_id for patch_id in ids if patch_id not in known}
    if unknown:
        raise UnknownPatchError([str(patch_id) for patch_id in unknown], known, source, _without_repair())
    return frozenset(id_of(patch_id, known) for patch_id in ids)


def _without_repair() -> set[str]:
    """Return the ids of known bugs without a patch, which only the message about an unknown patch needs."""
    try:
        return {bug.id for bug in loading.without_repair()}
    except CatalogueError:
        return set()


def _options(
    argument: Mapping[str, Options] | None, environment: Mapping[str, str], known: dict[str, Patch]
) -> Mapping[str, Options]:
    """Return ``{id: {option: choice}}`` of the argument, or else of the variable."""
    source = "options=" if argument is not None else "TRL_HOTFIX_OPTIONS"
    options = argument if argument is not None else _in_variable(source, environment)
    unknown = [patch_id for patch_id in options if patch_id not in known]
    if unknown:
        raise UnknownPatchError(unknown, known, source, _without_repair())
    chosen: dict[str, dict[str, str]] = {}
    for name, choices in options.items():
        patch_id = id_of(name, known)
        for option, choice in choices.items():
            _check_choice(source, known[name], option, choice)
            if chosen.setdefault(patch_id, {}).setdefault(option, choice) != choice:
                raise SettingError(
                    f"{source}: {patch_id}.{option} is there twice, as {chosen[patch_id][option]} and {choice}"
                )
        chosen.setdefault(patch_id, {})
    return chosen


def _in_variable(variable: str, environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return ``{id: {option: choice}}`` of a variable, which has ``id.option=choice``, separated by commas."""
    parsed: dict[str, dict[str, str]] = {}
    for text in filter(None, map(str.strip, environment.get(variable, "").split(","))):
        name, equals, choice = text.partition("=")
        patch_id, dot, option = name.strip().partition(".")
        if not (equals and dot):
            raise SettingError(f"{variable}: expected id.option=choice, found {quoted(text)}")
        before = parsed.setdefault(patch_id, {}).setdefault(option, choice.strip())
        if before != choice.strip():
            raise SettingError(f"{variable}: {quoted(name.strip())} is there twice, with two choices")
    return parsed


def _check_choice(source: str, patch: Patch, option: str, choice: str) -> None:
    """Raise ``SettingError`` if the patch does not have this option, or the option not this choice."""
    declared = patch.options
    if option not in declared:
        names = f"; it has {', '.join(declared)}" if declared else "; it has no options"
        hint = suggestion(option, declared) or names
        raise SettingError(f"{source}: {patch.id} has no option {quoted(option)}{hint}")
    if choice not in declared[option].choices:
        hint = suggestion(str(choice), declared[option].choices)
        expected = ", ".join(declared[option].choices)
        raise SettingError(f"{source}: {patch.id}.{option} is {quoted(choice)}, expected one of {expected}{hint}")
