"""Names of our own for patched plain functions, so that they pickle as what they are.

Under TRL's name a pickle of the patched function would be that of the unpatched one, and ``datasets`` would take what
it has cached from the one for the other. A name holds the module, the attribute, and the ids and revisions of the
patches; looking it up here applies those patches first, in a worker that has not done so yet.
"""

from __future__ import annotations

from typing import Any

Reference = tuple[str, str, tuple[tuple[str, int], ...]]
"""How a patched function is named in a pickle: module, attribute, and the (id, revision) of its patches."""


def name_of(reference: Reference) -> str:
    """The reference as one name. It has no dots: pickle takes what stands between them for attributes."""
    module, attribute, patches = reference
    return "|".join([module, attribute, *(f"{patch_id}@{revision}" for patch_id, revision in patches)]).replace(
        ".", "/"
    )


def __getattr__(name: str) -> Any:
    module, bar, rest = name.replace("/", ".").partition("|")
    if not bar:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute, *patches = rest.split("|")
    from importlib import import_module

    # Above this layer: what unpickles a function must be able to apply its patches.
    restore = import_module(f"{__package__}.engine").restore
    named = (patch.partition("@") for patch in patches)
    return restore((module, attribute, tuple((patch_id, int(revision)) for patch_id, _, revision in named)), None)
