"""``TRL_HOTFIX=1`` patches every process of the job, and costs other processes next to nothing.

It stops none but one that imports TRL under a setting that is not understood; ``test_settings_table`` has them all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from helpers import sharing

if TYPE_CHECKING:
    from launched.environments import Environment

THIRD_PARTY = ("wrapt", "yaml", "packaging", "msgspec", "click", "rich", "torch", "trl", "transformers")
LOADED = f"import sys; print(sorted(m for m in sys.modules if m.startswith('trl_hotfix') or m in {THIRD_PARTY}))"
FINDERS = "import sys; print(sum('trl_hotfix' in type(finder).__module__ for finder in sys.meta_path))"
IS_ON = "print(vars(DPOTrainer)['get_batch_loss_metrics'].__module__)"
ON, OFF = "trl_hotfix.patching.pickled\n", "trl.trainer.dpo_trainer\n"


def test_unset_nothing_is_loaded(installed: Environment) -> None:
    assert installed.code(LOADED).stdout == "[]\n"


def test_before_trl_only_the_standard_library_is_loaded(installed: Environment) -> None:
    modules = ["trl_hotfix", "trl_hotfix.autostart", "trl_hotfix.import_hooks", "trl_hotfix.settings"]
    assert installed.code(LOADED, TRL_HOTFIX="1").stdout == f"{modules}\n"


def test_repeated_starts_install_one_finder(installed: Environment) -> None:
    code = f"from trl_hotfix import autostart; autostart.start(); autostart.start(); {FINDERS}"
    assert installed.code(code, TRL_HOTFIX="1").stdout == "1\n"


ON_VALUES = ["1", "true", "yes", "on", "ON", "strict", "strict-all"]


@pytest.mark.parametrize("value", ON_VALUES)
def test_on_values_wait_for_trl(installed: Environment, value: str) -> None:
    process = installed.code(FINDERS, TRL_HOTFIX=value)
    assert (process.stdout, process.stderr) == ("1\n", "")


@pytest.mark.parametrize("value", sharing.heavy(ON_VALUES, smoke=["1", "strict"]))
def test_on_values_patch_trl(installed: Environment, value: str) -> None:
    assert installed.code(f"from trl import DPOTrainer; {IS_ON}", TRL_HOTFIX=value).stdout == ON


@pytest.mark.parametrize("value", ["", "0", "off", "false", "no", "No"])
def test_off_values_are_silent(installed: Environment, value: str) -> None:
    process = installed.code(FINDERS, TRL_HOTFIX=value)
    assert (process.stdout, process.stderr) == ("0\n", "")


def test_another_value_stops_the_import_of_trl_and_nothing_else(installed: Environment) -> None:
    process = installed.code("print('started')", TRL_HOTFIX="maybe")
    assert (process.returncode, process.stdout, process.stderr) == (0, "started\n", "")
    process = installed.code("print('started')\nfrom trl import DPOTrainer\nprint('not reached')", TRL_HOTFIX="maybe")
    assert (process.returncode, process.stdout) == (2, "started\n")
    assert process.stderr.startswith("trl_hotfix: ERROR: TRL_HOTFIX='maybe' is not understood.")


@pytest.mark.parametrize(
    "code",
    sharing.heavy(
        [
            "from trl import DPOTrainer",
            "from trl.trainer import DPOTrainer",
            "from trl.trainer.dpo_trainer import DPOTrainer",
            "import trl; DPOTrainer = trl.DPOTrainer",
            "import importlib; DPOTrainer = importlib.import_module('trl.trainer.dpo_trainer').DPOTrainer",
        ],
        smoke=["from trl import DPOTrainer", "from trl.trainer.dpo_trainer import DPOTrainer"],
    ),
)
def test_every_import_style_gets_the_patched_class(installed: Environment, code: str) -> None:
    process = installed.code(f"{code}; {IS_ON}", TRL_HOTFIX="1")
    assert process.stdout == ON, process.stderr
    assert process.stderr.count("repairs on for DPO, digest ") == 1


def test_importing_trl_alone_does_not_import_torch(installed: Environment) -> None:
    code = "import sys, trl; before = 'torch' in sys.modules; print(before)"
    assert installed.code(code, TRL_HOTFIX="1").stdout == installed.code(code).stdout


def test_apply_after_trl_is_as_good(installed: Environment) -> None:
    code = f"from trl import DPOTrainer; import trl_hotfix; print(trl_hotfix.apply()); {IS_ON}"
    process = installed.code(code)
    assert "moe-aux-loss-lost-under-deepspeed: applied (proven)\n" in process.stdout
    assert process.stdout.endswith(ON), process.stdout


def test_only_and_skip_take_ids(installed: Environment) -> None:
    code = f"from trl import DPOTrainer; {IS_ON}"
    patch_id = "moe-aux-loss-lost-under-deepspeed"
    assert installed.code(code, TRL_HOTFIX="1", TRL_HOTFIX_ONLY=patch_id).stdout == ON
    assert installed.code(code, TRL_HOTFIX="1", TRL_HOTFIX_SKIP=f" {patch_id} ,").stdout == OFF


@pytest.mark.parametrize("value", ["1", "strict", "observe"])
def test_an_unknown_id_stops_the_import_of_trl(installed: Environment, value: str) -> None:
    code = "from trl.trainer.dpo_trainer import DPOTrainer"
    process = installed.code(code, TRL_HOTFIX=value, TRL_HOTFIX_SKIP="moe-aux-loss-lost-under-deepsped")
    assert process.returncode == 2
    assert process.stderr.count("trl_hotfix: ") == 1
    assert "did you mean 'moe-aux-loss-lost-under-deepspeed'?" in process.stderr
    assert "Traceback" not in process.stderr


def test_zero_turns_off_a_scripts_own_apply(installed: Environment) -> None:
    code = f"import trl_hotfix; print(trl_hotfix.apply()); from trl import DPOTrainer; {IS_ON}"
    process = installed.code(code, TRL_HOTFIX="0")
    assert "disabled (switched-off)" in process.stdout
    assert process.stdout.endswith(OFF)
    assert "WARNING: TRL_HOTFIX=0 turns apply() off" in process.stderr


LIST = "from trl_hotfix.commands.main import main; main(['--list'])"


def test_the_list_tells_where_the_variable_cannot_work(installed: Environment) -> None:
    paths = [str(installed.packages), sysconfig.get_path("purelib")]
    process = installed.run("-S", "-c", f"import sys; sys.path += {paths}\n{LIST}", TRL_HOTFIX="1")
    assert "TRL_HOTFIX=1 does nothing here: Python runs with -S, which skips" in process.stdout, process.stderr
    assert installed.run("-S", "-c", FINDERS, TRL_HOTFIX="1").stdout == "0\n"


@pytest.mark.parametrize("flag", ["-E", "-I", "-P", "-s"])
def test_options_of_python_that_leave_other_variables_alone_change_nothing(installed: Environment, flag: str) -> None:
    if flag == "-P" and sys.version_info < (3, 11):
        pytest.skip("there is no -P")
    assert installed.run(flag, "-c", FINDERS, TRL_HOTFIX="1").stdout == "1\n"
    process = installed.run(flag, "-c", LIST, TRL_HOTFIX="1")
    assert "TRL_HOTFIX=1 works here; it is on in this shell" in process.stdout, process.stderr


def test_a_hook_that_has_run_from_another_folder_is_believed(installed: Environment, bare: Environment) -> None:
    """pex and shiv have the packages in a folder of their own, and add it as ``site`` does."""
    code = f"import site; site.addsitedir({str(installed.packages)!r})\n{LIST}"
    assert "TRL_HOTFIX=1 works here" in bare.run("-c", code, TRL_HOTFIX="1").stdout
    path = f"import sys; sys.path.append({str(installed.packages)!r})\n{LIST}"
    assert "TRL_HOTFIX=1 does nothing here: trl_hotfix_autoapply.pth" in bare.run("-c", path, TRL_HOTFIX="1").stdout


def test_user_logging_replaces_standard_error(installed: Environment, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"import logging; logging.basicConfig(filename={str(log)!r}, level='INFO'); import trl.trainer.dpo_trainer"
    process = installed.code(code, TRL_HOTFIX="1")
    assert "repairs on for DPO" in log.read_text()
    assert "repairs on for DPO" not in process.stderr


# What is imported.

PATCHES = """
import json, sys
from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates

of_families = (name for name in sys.modules if name.startswith("trl_hotfix.patches."))
loaded = sorted(name for name in of_families if name.count(".") == 3)
concerned = {
    modules.module_of(patch.id)
    for patch in loading.load()
    if any(target.module in sys.modules for target in gates.targets_here(patch))
}
print(json.dumps([loaded, sorted(set(loaded) - concerned)]))
"""


@pytest.mark.parametrize("value", ["1", "observe"])
def test_only_patches_of_imported_modules_of_trl_are_imported(installed: Environment, value: str) -> None:
    orpo_alone = "import trl.trainer.orpo_trainer"
    codes = ["import trl", orpo_alone, f"{orpo_alone}, trl.trainer.dpo_trainer"]
    answers = [installed.code(f"{code}\n{PATCHES}", TRL_HOTFIX=value).stdout for code in codes]
    (alone, others), (orpo, of_others), (both, of_neither) = map(json.loads, answers)
    assert others == of_others == of_neither == []
    assert "trl_hotfix.patches.preference.orpo_nan_gradient_near_certainty" in set(orpo) - set(alone)
    assert set(orpo) < set(both)
    assert "trl_hotfix.patches.dpo.dpo_aux_loss_dropped" not in orpo


def test_a_start_and_a_report_import_neither_the_screen_nor_yaml(installed: Environment) -> None:
    code = "import sys, trl_hotfix; trl_hotfix.apply(); trl_hotfix.status()"
    process = installed.code(f"{code}; print([name for name in ('click', 'rich', 'yaml') if name in sys.modules])")
    assert process.stdout == "[]\n", process.stderr


# Damage.


def import_after_damage(installed: Environment, damage: str) -> subprocess.CompletedProcess[str]:
    package = installed.packages / "trl_hotfix"
    if damage == "package":
        shutil.rmtree(package)
    elif damage == "data/patches.json":
        (package / damage).write_text("- id: [")
    else:
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        (package / damage).unlink()
    return installed.code(f"from trl import DPOTrainer; {IS_ON}", TRL_HOTFIX="1")


@pytest.mark.parametrize(
    "damage",
    sharing.heavy(
        [
            "package",
            "autostart.py",
            "import_hooks.py",
            "patching/engine.py",
            "patching/sites.py",
            "data/fingerprints.json",
            "data/patches.json",
        ],
        smoke=["package", "import_hooks.py", "patching/engine.py", "data/patches.json"],
    ),
)
def test_a_damaged_installation_never_stops_python(own: Environment, damage: str) -> None:
    process = import_after_damage(own, damage)
    assert process.returncode == 0, process.stderr
    assert process.stdout == OFF
    assert "trl_hotfix" in process.stderr


def test_a_damaged_patch_keeps_no_other_from_going_on(own: Environment) -> None:
    damaged, remedy = "moe-aux-loss-lost-under-deepspeed", "install trl_hotfix again"
    file = own.packages / "trl_hotfix" / "patches" / "preference" / f"{damaged.replace('-', '_')}.py"
    file.write_text("")
    code = "from trl import DPOTrainer\nimport trl_hotfix\nfor patch in trl_hotfix.status(): print(patch)"
    process = own.code(code, TRL_HOTFIX="1")
    assert process.returncode == 0
    assert f"{damaged}: failed (install-error)" in process.stdout
    assert ": applied (proven)" in process.stdout
    (told,) = (line for line in process.stderr.splitlines() if remedy in line)
    assert f"{damaged} (r" in told
    assert "is NOT on: failed (install-error)" in told


@pytest.mark.parametrize("damage", ["patching/engine.py", "data/patches.json"])
def test_a_damaged_strict_installation_stops_at_trl(own: Environment, damage: str) -> None:
    for cache in (own.packages / "trl_hotfix").rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)
    if damage == "data/patches.json":
        (own.packages / "trl_hotfix" / damage).write_text("- id: [")
    else:
        (own.packages / "trl_hotfix" / damage).unlink()
    code = "print('started')\ntry:\n import trl\nexcept Exception: pass\nimport trl"
    process = own.code(code, TRL_HOTFIX="strict")
    assert process.stdout == "started\n"
    assert process.returncode == 1


# Other processes: test_every_process.py has them too, each without what it logs.


@pytest.mark.matrix
def test_spawned_and_forked_workers_are_patched_too(installed: Environment, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """
            import multiprocessing

            def work(_):
                from trl import DPOTrainer
                import trl_hotfix
                return vars(DPOTrainer)["get_batch_loss_metrics"].__module__, trl_hotfix.status().digest

            if __name__ == "__main__":
                answers = set()
                for method in ("spawn", "fork", "forkserver"):
                    answers.update(multiprocessing.get_context(method).Pool(1).map(work, [0]))
                (answer,) = answers
                print(answer[0])
            """
        )
    )
    process = installed.run(str(script), TRL_HOTFIX="1")
    assert process.stdout == ON, process.stderr


@pytest.mark.matrix
def test_torchrun_patches_every_rank(installed: Environment, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\nfrom trl import DPOTrainer\n{IS_ON}")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", str(script))
    for amount, expected in {"summary": [True, False], "full": [True, True], "quiet": [False, False]}.items():
        process = installed.run(*launcher, TRL_HOTFIX="1", TRL_HOTFIX_LOG=amount)
        assert process.stdout.count(ON) == 2, process.stderr
        lines = [rf"trl_hotfix \[rank {rank}\]: INFO: \d+ repairs on for DPO" for rank in (0, 1)]
        assert [bool(re.search(line, process.stderr)) for line in lines] == expected
        of_each = process.stderr.count("DEBUG: repair of moe-aux-loss-lost-under-deepspeed is on")
        assert of_each == (2 if amount == "full" else 0)
