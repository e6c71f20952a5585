"""Make a checkout with more patches than there are, to see what many cost.

    python -m tools.copies 110 FOLDER

A copy of a patch is an entry, a module, a proof and its evidence under another id, with the present keys. Each repairs
what the original repairs: with both on, the second finds no bug, so the tests that put all patches on fail for copies.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import click

from trl_hotfix.catalogue import modules

CHECKOUT = Path(__file__).parents[1]

KEYS = """
from bench.results import evidence, keys
from trl_hotfix.catalogue import loading
for patch in loading.load():
    record = evidence.load(patch.id)
    if record["patch"] != patch.id:
        for cell in record["cells"]:
            cell["key"] = keys.cell_key(patch, evidence.Place(cell["ran"], cell["stack"]))
        for proof in record["proofs"]:
            proof["key"] = keys.proof_key(patch, evidence.place_of(proof))
        file = evidence.EVIDENCE / f"{patch.id}.json"
        file.write_text(evidence.dumped(patch, record))
"""


def copied(checkout: Path, number: int, entry: str, patch_id: str) -> str:
    """Write the module, the proof and the evidence of a copy, and return its entry."""
    new_id = f"{patch_id}-copy-{number}"
    old_name, new_name = patch_id.replace("-", "_"), new_id.replace("-", "_")
    for folder in (f"{top}/{modules.family_of(patch_id)}" for top in ("trl_hotfix/patches", "tests/proofs")):
        text = (checkout / folder / f"{old_name}.py").read_text(encoding="utf-8")
        new_text = text.replace(patch_id, new_id).replace(f'"{old_name}"', f'"{new_name}"')
        (checkout / folder / f"{new_name}.py").write_text(new_text, encoding="utf-8")
    shutil.copy(checkout / "evidence" / f"{patch_id}.json", checkout / "evidence" / f"{new_id}.json")
    return entry.replace(f"- id: {patch_id}", f"- id: {new_id}", 1)


def entries_of(manifest: str) -> dict[str, str]:
    """Return the text of each entry of patches.yaml, by id."""
    lines = manifest.splitlines(True)
    starts = [index for index, line in enumerate(lines) if line.startswith("- id: ")]
    texts = ["".join(lines[start:end]) for start, end in itertools.pairwise([*starts, len(lines)])]
    return {text.splitlines()[0].removeprefix("- id: ").strip(): text.rstrip("\n") + "\n\n" for text in texts}


@click.command()
@click.argument("count", type=click.IntRange(1))
@click.argument("folder", type=click.Path(path_type=Path))
def main(count: int, folder: Path) -> None:
    """Clone this checkout's HEAD into FOLDER, and add copies until its catalogue has COUNT patches."""
    subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(folder)], check=True)
    manifest = folder / "patches.yaml"
    entries = entries_of(manifest.read_text(encoding="utf-8"))
    originals = itertools.cycle(entries.items())
    copies = [
        copied(folder, number // len(entries) + 2, entry, patch_id)
        for number, (patch_id, entry) in zip(range(count - len(entries)), originals, strict=False)
    ]
    with manifest.open("a", encoding="utf-8") as file:
        file.write("\n" + "".join(copies))
    # The bodies are read from the releases that are laid out here. The clone lays them out itself when they are needed.
    bench = folder / ".bench"
    bench.symlink_to(CHECKOUT / ".bench")
    subprocess.run([sys.executable, "-c", KEYS], cwd=folder, env={"PYTHONPATH": str(folder)}, check=True)
    bench.unlink()
    commit = ["-c", "user.name=copies", "-c", "user.email=copies@example.org", "commit", "--quiet", "-m", "Copies"]
    for arguments in (["add", "--all"], commit):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    click.echo(f"{folder}: {len(entries) + len(copies)} patches")


if __name__ == "__main__":
    main()
