"""The patches and the options that the user asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from ..catalogue import loading
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

        An argument wins over its variable. If ``only`` is ``"@file"``, the freeze file decides alone, and the variables
        of ``skip`` and ``options`` are ignored.

        Raises ``UnknownPatchError`` for an id that none of ``patches`` has, ``SettingError`` for an unknown option or
        choice, and for a freeze file that cannot be applied as it is.
        """
        known = {patch.id: patch for patch in patches}
        file = environment.get("TRL_HOTFIX_ONLY", "").strip() if only is None else only
        if isinstance(file, str) and file.startswith("@"):
            if skip is not None or options is not None:
                raise SettingError(
                    f"only={quoted(file)} applies exactly what the file names: leave skip= and options= out"
                )
            frozen = freeze_files.read(file[1:], known, {name: find(name).release for name in packs})
            return cls(
                only=frozenset(entry.id for entry in frozen.patches),
                options={entry.id: entry.options for entry in frozen.patches if entry.options},
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


def _ids(
    argument: Iterable[str] | None, name: str, variable: str, environment: Mapping[str, str], known: Collection[str]
) -> frozenset[str] | None:
    source = f"{name}="
    if argument is None:
        argument = [patch_id for patch_id in map(str.strip, environment.get(variable, "").split(",")) if patch_id]
        source = variable
        if not argument:
            return None
    ids = frozenset([argument] if isinstance(argument, str) else argument)
    unknown = {patch_id for patch_id in ids if patch_id not in known}
    if unknown:
        raise UnknownPatchError([str(patch_id) for patch_id in unknown], known, source, _without_repair())
    return ids


def _without_repair() -> set[str]:
    """Return the ids of known bugs without a patch, which only the message about an unknown patch needs."""
    try:
        return {bug.id for bug in loading.without_repair()}
    except CatalogueError:
        return set()


def _options(
    argument: Mapping[str, Options] | None, environment: Mapping[str, str], known: Mapping[str, Patch]
) -> Mapping[str, Options]:
    """Return ``{id: {option: choice}}``. In the variable it is ``id.option=choice``, separated by commas."""
    options, source = argument, "options="
    if options is None:
        source = "TRL_HOTFIX_OPTIONS"
        parsed: dict[str, dict[str, str]] = {}
        for text in filter(None, map(str.strip, environment.get(source, "").split(","))):
            name, equals, choice = text.partition("=")
            patch_id, dot, option = name.strip().partition(".")
            if not (equals and dot):
                raise SettingError(f"{source}: expected id.option=choice, found {quoted(text)}")
            parsed.setdefault(patch_id, {})[option] = choice.strip()
        options = parsed
    unknown = [patch_id for patch_id in options if patch_id not in known]
    if unknown:
        raise UnknownPatchError(unknown, known, source, _without_repair())
    for patch_id, choices in options.items():
        declared = known[patch_id].options
        for option, choice in choices.items():
            if option not in declared:
                names = f"; it has {', '.join(declared)}" if declared else "; it has none"
                hint = suggestion(option, declared) or names
                raise SettingError(f"{source}: {patch_id} has no option {quoted(option)}{hint}")
            if choice not in declared[option].choices:
                hint = suggestion(str(choice), declared[option].choices)
                expected = ", ".join(declared[option].choices)
                raise SettingError(
                    f"{source}: {patch_id}.{option} is {quoted(choice)}, expected one of {expected}{hint}"
                )
    return {patch_id: dict(choices) for patch_id, choices in options.items()}
