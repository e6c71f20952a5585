"""What a wheel has of ``patches.yaml`` and ``known.yaml``: their entries as JSON, checked against the patches' modules.

    python -m trl_hotfix.catalogue.shipped           check both files of the checkout, as `make lint` does
    python -m trl_hotfix.catalogue.shipped FOLDER    and write patches.json and known.json, as the build of a wheel does

It prints every mistake with its line, and then ends with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import CatalogueError
from .data_files import checkout
from .loading import text_of
from .names import by_name
from .parsing import parse, parse_known


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of ``patches.json`` and ``known.json`` for the checkout ``folder``.

    Raises ``CatalogueError`` with every mistake of a file.
    """
    manifest, known = folder / "patches.yaml", folder / "known.yaml"
    patches = parse(text_of(manifest), str(manifest))
    bugs = parse_known(text_of(known), str(known), by_name(patches))
    return {"patches.json": msgspec.json.encode(patches), "known.json": msgspec.json.encode(bugs)}


def main(arguments: Sequence[str]) -> str | None:
    """Check the catalogue, and write it to the folder in ``arguments``. Return the mistakes, or None."""
    folder = checkout()
    if folder is None:
        return "this is an installed package: it has no patches.yaml to check"
    try:
        contents = files(folder)
    except CatalogueError as error:
        return str(error)
    for into in map(Path, arguments):
        for name, content in contents.items():
            (into / name).write_bytes(content)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
