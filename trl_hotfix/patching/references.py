"""Names of our own for patched plain functions, so that they pickle as what they are.

Under TRL's name a pickle of the patched function would be that of the unpatched one, and ``datasets`` would take what
it has cached from the one for the other. A name holds the module, the attribute, and the ids, the revisions and the
options of the patches; looking it up here applies those patches first, in a worker that has not done so yet.
"""

from __future__ import annotations

MODULE = f"{__package__}.pickled"
"""The module that looks such a name up."""

Named = tuple[str, int, tuple[tuple[str, str], ...]]
"""A patch as a pickle names it: id, revision, and the (option, choice) pairs."""

Reference = tuple[str, str, tuple[Named, ...]]
"""How a patched function is named in a pickle: module, attribute, and its patches."""


def name_of(reference: Reference) -> str:
    """The reference as one name. It has no dots: pickle takes what stands between them for attributes."""
    module, attribute, patches = reference
    named = (
        # The bar of a pack's id: a slash stands for a dot here.
        "&".join([f"{patch_id.replace('/', ':')}@{revision}", *(f"{option}={choice}" for option, choice in options)])
        for patch_id, revision, options in patches
    )
    return "|".join([module, attribute, *named]).replace(".", "/")


def parsed(name: str) -> Reference | None:
    """Return the reference that ``name`` stands for; None if it is another name."""
    module, bar, rest = name.replace("/", ".").partition("|")
    if not bar:
        return None
    attribute, *patches = rest.split("|")
    return module, attribute, tuple(map(_named, patches))


def _named(text: str) -> Named:
    patch, *options = text.split("&")
    patch_id, _, revision = patch.partition("@")
    pairs = (option.partition("=") for option in options)
    return patch_id.replace(":", "/"), int(revision), tuple((name, choice) for name, _, choice in pairs)
