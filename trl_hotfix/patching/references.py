"""Names under which patched plain functions are pickled.

Under TRL's name the pickles of the patched and of the unpatched function would be equal, and ``datasets`` would reuse
the cached data of one for the other. A name holds the module, the attribute, and the ids, the revisions and the options
of the patches. Looking it up applies those patches first, in a worker that has not applied them yet.
"""

from __future__ import annotations

MODULE = f"{__package__}.pickled"
"""The module that looks up such a name."""

Named = tuple[str, int, tuple[tuple[str, str], ...]]
"""A patch as a pickle names it: id, revision, and the (option, choice) pairs."""

Reference = tuple[str, str, tuple[Named, ...]]
"""The name of a patched function in a pickle: module, attribute, and its patches."""


def name_of(reference: Reference) -> str:
    """Return the reference as one name. It has no dots, since pickle splits a name at dots into attributes."""
    module, attribute, patches = reference
    named = (
        # The slash in the id of a pack's patch becomes a colon, since a slash stands for a dot here.
        "&".join([f"{patch_id.replace('/', ':')}@{revision}", *(f"{option}={choice}" for option, choice in options)])
        for patch_id, revision, options in patches
    )
    return "|".join([module, attribute, *named]).replace(".", "/")


def parsed(name: str) -> Reference | None:
    """Return the reference that ``name`` stands for, or None if it is another kind of name."""
    module, bar, path = name.replace("/", ".").partition("|")
    if not bar:
        return None
    attribute, *patches = path.split("|")
    return module, attribute, tuple(map(_named, patches))


def _named(text: str) -> Named:
    patch, *options = text.split("&")
    patch_id, _, revision = patch.partition("@")
    pairs = (option.partition("=") for option in options)
    return patch_id.replace(":", "/"), int(revision), tuple((name, choice) for name, _, choice in pairs)
