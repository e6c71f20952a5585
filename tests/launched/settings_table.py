"""What a program that imports TRL does under each setting: the rows of ``test_settings_table``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ID, OTHER = "moe-aux-loss-lost-under-deepspeed", "dpo-eval-reference-from-trained-policy"
OPTION = "grpo-loss-normalisation.normalisation"


@dataclass(frozen=True)
class Row:
    """One setting. ``told`` is in what the program writes to standard error; if it is empty, that is empty too.

    Of the patches that go on, ``ids`` are all if there are any, and none is among ``without``. ``FOLDER`` in a value is
    the folder of the files in ``FILES``.
    """

    outcome: Literal["on", "off", "observe", "stopped"]
    told: str = ""
    ids: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(f"{name.removeprefix('TRL_')}={value!r}" for name, value in self.variables.items()) or "unset"


def row(
    outcome: Literal["on", "off", "observe", "stopped"],
    value: str | None,
    told: str = "",
    ids: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **variables: str,
) -> Row:
    of_hotfix = {f"TRL_HOTFIX_{name}": text for name, text in variables.items()}
    return Row(outcome, told, ids, without, of_hotfix if value is None else {"TRL_HOTFIX": value, **of_hotfix})


VALID = "Expected one of 1, true, yes, on, strict, strict-all, observe, 0, false, no, off."
ALONE = "applies exactly what the file names: leave"
CHANGED = "changed by hand\n  write it again: `trl-hotfix freeze -o FILE`"

ROWS = [
    # The switch.
    row("off", None),
    row("off", ""),
    row("off", " "),
    row("off", "0"),
    row("off", "No"),
    row("on", "1"),
    row("on", " ON "),
    row("on", "true"),
    row("on", "strict"),
    row("on", "strict-all"),
    row("observe", "observe"),
    row("stopped", "stict", f"TRL_HOTFIX='stict' is not understood; did you mean 'strict'? {VALID}"),
    row("stopped", "observed", "did you mean 'observe'?"),
    row("stopped", "maybe", f"TRL_HOTFIX='maybe' is not understood. {VALID}"),
    row("stopped", "2", f"TRL_HOTFIX='2' is not understood. {VALID}"),
    row("stopped", "1;\x1b[31m", r"TRL_HOTFIX='1;\x1b[31m' is not understood"),
    # Without repairs nothing else is looked at.
    row("off", None, SKIP="nonsense", CALLBACK="maybe"),
    row("off", "0", ONLY="@/no/such/file", PACKS="nobodys"),
    # Which patches.
    row("on", "1", ids=(ID,), ONLY=ID),
    row("on", "1", ids=(ID, OTHER), ONLY=f" {ID} , {OTHER},"),
    row("on", "1", ONLY=" "),
    row("stopped", "1", "TRL_HOTFIX_ONLY=',' names no patch", ONLY=","),
    row("stopped", "1", f"unknown patch in TRL_HOTFIX_ONLY: '{ID[:-1]}'; did you mean '{ID}'?", ONLY=ID[:-1]),
    row("stopped", "strict", f"did you mean '{ID}'?", ONLY=f"{OTHER},{ID.replace('-', '_')}"),
    row("stopped", "1", "a known bug that has no repair here", ONLY="gold-eos-masked-when-pad-is-eos"),
    row("on", "1", without=(ID,), SKIP=ID),
    row("on", "1", SKIP=","),
    row("stopped", "1", f"unknown patch in TRL_HOTFIX_SKIP: '{ID[:-1]}'; did you mean '{ID}'?", SKIP=ID[:-1]),
    row("stopped", "observe", "unknown patch in TRL_HOTFIX_SKIP: 'x'.", SKIP=f"{ID},x"),
    row("stopped", "1", "no pack 'nobodys' is installed", PACKS="nobodys"),
    # Options of patches, and what is noted.
    row("on", "1", "options of grpo-loss-normalisation do nothing here", OPTIONS=f"{OPTION}=global"),
    row("stopped", "1", "unknown patch in TRL_HOTFIX_OPTIONS: 'grpo'", OPTIONS="grpo.normalisation=global"),
    row("stopped", "1", "did you mean 'normalisation'?", OPTIONS=f"{OPTION[:-1]}=global"),
    row("stopped", "1", "did you mean 'global'?", OPTIONS=f"{OPTION}=globl"),
    row("stopped", "1", "expected id.option=choice, found 'global'", OPTIONS="global"),
    row("stopped", "1", "is there twice, with two choices", OPTIONS=f"{OPTION}=global,{OPTION}=sequence"),
    row("on", "1", CALLBACK="0"),
    row("stopped", "1", "TRL_HOTFIX_CALLBACK='maybe' is not understood. Expected one of 1, true", CALLBACK="maybe"),
    row("stopped", "1", "TRL_HOTFIX_CALLBACK='strict' is not understood", CALLBACK="strict"),
    row("stopped", "strict", "TRL_HOTFIX_CALLBACK=0 leaves out the callback that decides", CALLBACK="0"),
    row("stopped", "strict-all", "TRL_HOTFIX_CALLBACK=0 leaves out the callback that decides", CALLBACK="no"),
    row("on", "1", UNKNOWN_BODY="try"),
    row("stopped", "1", "(TRL_HOTFIX_UNKNOWN_BODY) is 'tri': expected 'skip' or 'try'", UNKNOWN_BODY="tri"),
    # What changes no number has a default, and a warning where it is asked.
    row("on", "1", PATIENCE="soon"),
    row("on", "1", "WARNING: TRL_HOTFIX_LOG='loud' is not one of", LOG="loud"),
    row("on", "1", "WARNING: TRL_HOTFIX_SKP is no variable of trl_hotfix and does nothing; did you mean", SKP=ID),
    row("on", "1", GPU_PYTHON="python3", PORT_8080_TCP="tcp://10.0.0.1:8080"),
    row("on", "1", "WARNING: TRL_HOTFIX_LOG_FORMAT='xml' is not one of", LOG_FORMAT="xml"),
    # Policies.
    row("on", "1", ids=(ID, OTHER), ONLY="@FOLDER/right.json"),
    row("on", "strict", ids=(ID, OTHER), ONLY="@FOLDER/right.json"),
    row("stopped", "1", "No such file or directory", ONLY="@FOLDER/none.json"),
    row("stopped", "strict", "No such file or directory", ONLY="@FOLDER/none.json"),
    row("stopped", "observe", "No such file or directory", ONLY="@FOLDER/none.json"),
    row("stopped", "1", CHANGED, ONLY="@FOLDER/deleted.json"),
    row("stopped", "observe", CHANGED, ONLY="@FOLDER/deleted.json"),
    row("stopped", "strict", CHANGED, ONLY="@FOLDER/other_trl.json"),
    row("stopped", "1", f"entry 2: {ID} is revision 99 there", ONLY="@FOLDER/revision.json"),
    row("stopped", "1", "cannot be used: Expecting value", ONLY="@FOLDER/garbage.json"),
    row("stopped", "1", f"{ALONE} TRL_HOTFIX_SKIP out", ONLY="@FOLDER/right.json", SKIP=ID),
]
