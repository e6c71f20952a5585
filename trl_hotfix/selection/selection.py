"""What the user asked for: which patches, and with which options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from ..catalogue.packs import find
from ..errors import SettingError, UnknownPatchError, suggestion
from ..model import Options, Patch
from . import freeze_files
from .freeze_files import Frozen


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
            frozen = freeze_files.read(file[1:], known, {name: find(name).release for name in packs})
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
