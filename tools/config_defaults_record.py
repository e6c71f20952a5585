"""Write ``trl_hotfix/data/defaults.json``: the defaults of TRL's configs in each release, for ``compare``.

``python -m tools.config_defaults_record`` reads the releases that are laid out. ``--check`` writes nothing, and
fails if the file would be another.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from trl_hotfix.catalogue.data_files import data_file
from trl_hotfix.matching import config_defaults, sources

from bench.releases import layout


def of_all_releases() -> str:
    """Return the content of the file, from the files of all releases, which have to be laid out."""
    return config_defaults.as_text(config_defaults.recorded({name: _defaults(name) for name in layout.releases()}))


def with_release(text: str, release: str) -> str:
    """Return the content of the file with a new release. One that is not the newest needs all releases laid out."""
    record = msgspec.json.decode(text, type=config_defaults.Record)
    if any(release in names for names in record["releases"].values()):
        return text
    if release != layout.releases()[-1]:
        return of_all_releases()
    return config_defaults.as_text(config_defaults.extended(record, release, _defaults(release)))


def _defaults(release: str) -> dict[str, dict[str, str]]:
    return config_defaults.defaults_of(sources.Release(layout.BENCH / "overlay" / release))


@click.command()
@click.option("--check", is_flag=True, help="Write nothing, and fail if the file is out of date.")
def main(check: bool) -> None:
    path: Path = data_file("defaults.json")
    content = of_all_releases()
    if not check:
        path.write_text(content, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != content:
        raise click.ClickException(f"{path.name} is out of date: python -m tools.config_defaults_record")


if __name__ == "__main__":
    main()
