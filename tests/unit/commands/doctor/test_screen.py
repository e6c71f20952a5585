"""The answer of ``doctor`` in a terminal: problems come first, and nothing of the answer is left out."""

from __future__ import annotations

import pytest

from trl_hotfix.commands.doctor.answer import (
    Answer,
    DataFile,
    Hook,
    Pack,
    Patcher,
    Problem,
    PthFile,
    Python,
    Trl,
    Variable,
)
from trl_hotfix.commands.doctor.screen import print_answer


def an_answer() -> Answer:
    return Answer(
        trl_hotfix="9.8.7",
        folder="/[bold]package",
        problems=[Problem(problem="the [bold]problem", remedy="the remedy")],
        python=Python(version="CPython 3.11", executable="/bin/python", platform="Linux", flags=["-s", "-P"]),
        trl=Trl(version="0.11.4", supported=True, kind="fork", folder="/trl", others=["/old/trl"]),
        packages={"torch": "2.0", "vllm": None},
        hook=Hook(problem=None, effective=False, folder=None, said=[]),
        variables=[Variable(name="TRL_HOTFIX", value="maybe", problem="expected 1")],
        patchers=[Patcher(name="unsloth", version="2026.1", does="generates trainers", look="states")],
        finders=["nosy.Finder"],
        pth=[PthFile(folder="/site", name="a.pth", ours=False), PthFile(folder="/site", name="b.pth", ours=True)],
        files={
            "patches": DataFile(path="/patches.yaml", sha256="0123456789abcdef0000", count=41),
            "proven": DataFile(path="/proven.json", sha256=None, count=None),
        },
        packs=[Pack(name="acme", release="acme==1.2", named=True), Pack(name="beta", release="beta==1", named=False)],
        applies=3,
        digest="feed",
    )


def printed(answer: Answer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the printed lines, with one space between words."""
    print_answer(answer)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_every_fact_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(an_answer(), capsys) == [
        "PROBLEM the [bold]problem",
        "-> the remedy",
        "trl_hotfix 9.8.7 in /[bold]package",
        "Python CPython 3.11 -s -P /bin/python",
        "platform Linux",
        "TRL 0.11.4, fork, in /trl",
        "another TRL /old/trl",
        "beside it torch 2.0, vllm -",
        "set 3 patches apply here, digest feed",
        "TRL_HOTFIX=1 does not work",
        "variable TRL_HOTFIX=maybe WRONG: expected 1",
        "patcher unsloth 2026.1: generates trainers. Look at states",
        "finders nosy.Finder",
        ".pth files /site: a.pth, b.pth (ours)",
        "patches 41 patches, /patches.yaml, sha256 0123456789abcdef",
        "proven unreadable, /proven.json, sha256 none",
        "pack acme of acme==1.2, named",
        "pack beta of beta==1, not named",
    ]


def test_missing_facts_are_named_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    answer = an_answer()
    answer.update({"problems": [], "finders": [], "digest": None, "applies": None})
    answer["trl"].update({"version": None, "kind": None, "folder": None})
    answer["hook"]["effective"] = True
    answer["variables"][0]["problem"] = None
    lines = printed(answer, capsys)
    assert lines[0] == "no problem found"
    for line in (
        "TRL none",
        "set none",
        "TRL_HOTFIX=1 works: a fresh Python waits for TRL",
        "variable TRL_HOTFIX=maybe",
        "finders none but Python's and ours",
    ):
        assert line in lines
