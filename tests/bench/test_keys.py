"""A key changes when, and only when, something changes that a result depends on."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.model import Patch

from bench.releases import layout
from bench.results import keys

CHECKOUT = Path(__file__).parents[2]
ID = "dpo-aux-loss-dropped"
MODULE = "trl_hotfix/patches/dpo/dpo_aux_loss_dropped.py"
PROOF = "tests/proofs/dpo/dpo_aux_loss_dropped.py"

Edit = Callable[[str, str, str], None]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("trl_hotfix", "tests/tiny", "tests/proofs"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def edit(copied: Path) -> Edit:
    def replace_in(name: str, old: str, new: str) -> None:
        path = copied / name
        text = path.read_text(encoding="utf-8")
        assert old in text, (name, old)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return replace_in


def patch(patch_id: str = ID) -> Patch:
    return next(patch for patch in loading.load() if patch.id == patch_id)


def code_key(folder: Path) -> str:
    """Return the key of the self-test and the wrapper of the patch, read from ``folder``."""
    module = modules.module_of(ID)
    names = [patch().self_test, *(target.wrapper for target in patch().targets)]
    return keys.digest_of(sources(folder).code((module, name) for name in names))


def proof_key(folder: Path) -> str:
    return keys.digest_of(sources(folder).code([("dpo_aux_loss_dropped", "train")]))


def sources(folder: Path) -> keys.Sources:
    return keys.Sources(folder, folder / "tests", *sorted((folder / "tests" / "proofs").iterdir()))


UNUSED = "def unused():\n    return 1\n\n\n"

UNRELATED = {
    "a comment": (MODULE, "    import torch\n", "    # One pair.\n    import torch\n"),
    "a docstring": (MODULE, '    """', '    """Another sentence. '),
    "an unrelated helper": ("trl_hotfix/authoring/training.py", "def micro_batches(", UNUSED + "def micro_batches("),
    "a helper of others": ("trl_hotfix/testing/online.py", "import torch", "import torch\n    unused = 1"),
    "another patch": ("trl_hotfix/patches/sft/sft_aux_loss_counted_twice.py", "def ", UNUSED + "def "),
}


@pytest.mark.parametrize("change", UNRELATED)
def test_what_a_self_test_does_not_use_keeps_its_key(copied: Path, edit: Edit, change: str) -> None:
    before = code_key(copied)
    edit(*UNRELATED[change])
    assert code_key(copied) == before


USED = {
    "the wrapper": (MODULE, "loss = loss + coefficient *", "loss = loss + 2 * coefficient *"),
    "the self-test": (MODULE, "router_aux_loss_coef=0.5", "router_aux_loss_coef=0.75"),
    "a helper of the self-test": ("trl_hotfix/testing/models.py", "index = torch.arange(", "index = 1 + torch.arange("),
    # dpo_stub calls stub_trainer, which reads this.
    "a helper two calls deep": ("trl_hotfix/testing/trainers.py", '"num_processes": 1', '"num_processes": 2'),
}


@pytest.mark.parametrize("change", USED)
def test_what_a_self_test_uses_changes_its_key(copied: Path, edit: Edit, change: str) -> None:
    before = code_key(copied)
    edit(*USED[change])
    assert code_key(copied) != before


def test_a_proof_depends_on_the_makers_it_calls(copied: Path, edit: Edit) -> None:
    before = proof_key(copied)
    edit("tests/tiny/sft_runs.py", "import torch", "import torch\n    unused = 1")
    assert proof_key(copied) == before
    edit("tests/tiny/models.py", '"num_local_experts": 4', '"num_local_experts": 8')
    assert proof_key(copied) != before


def test_what_a_name_stands_for_in_another_library_is_part_of_the_key(copied: Path, edit: Edit) -> None:
    module = "made_up_for_imports"
    (copied / f"{module}.py").write_text("from math import sqrt\n\n\ndef root(x):\n    return sqrt(x)\n")
    before = keys.digest_of(sources(copied).code([(module, "root")]))
    edit(f"{module}.py", "from math import sqrt", "import json\nfrom math import sqrt")
    assert keys.digest_of(sources(copied).code([(module, "root")])) == before
    edit(f"{module}.py", "from math import sqrt", "from cmath import sqrt")
    assert keys.digest_of(sources(copied).code([(module, "root")])) != before


def every_code(folder: Path, family: str = "") -> dict[str, str]:
    """Return what the keys of all patches have of our code, with their modules in their families or all in one."""
    read = sources(folder)
    found = {}
    for entry in loading.load():
        name = entry.id.replace("-", "_")
        module = f"trl_hotfix.patches.{family or modules.family_of(entry.id)}.{name}"
        wrappers = [(module, target.wrapper) for target in entry.targets]
        cell = read.code([(module, entry.self_test), *wrappers])
        found[entry.id] = keys.digest_of([cell, read.code([*wrappers, (name, "train")])])
    return found


def test_a_file_that_moves_makes_nothing_stale(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path, dirs_exist_ok=True)
    patches, proofs = tmp_path / "trl_hotfix" / "patches", tmp_path / "tests" / "proofs"
    for folder in (patches, proofs):
        (folder / "another").mkdir()
        for file in [*folder.glob("*/*.py")]:
            text = re.sub(r"from trl_hotfix\.patches\.\w+", "from trl_hotfix.patches.another", file.read_text("utf-8"))
            (folder / "another" / file.name).write_text(text, encoding="utf-8")
            file.unlink()
    before = every_code(copied)
    assert len(set(before.values())) == len(before)
    assert every_code(tmp_path, "another") == before


def test_a_proof_does_not_depend_on_the_self_test() -> None:
    place = layout.main_place("1.7.1")
    other = replace(patch(), self_test=patch().targets[0].wrapper)
    assert keys.proof_key(other, place) == keys.proof_key(patch(), place)
    assert keys.cell_key(other, place) != keys.cell_key(patch(), place)


def test_two_functions_of_one_name_are_told_apart(copied: Path) -> None:
    texts = ["from one import sure\n", "from two import sure\n"]
    (copied / "one.py").write_text("def sure(x):\n    return x\n")
    (copied / "two.py").write_text("def sure(x):\n    return not x\n")
    found = set()
    for text in [f"{text}\n\ndef wrapper(x):\n    return sure(x)\n" for text in texts]:
        (copied / "made_up_for_names.py").write_text(text)
        found.add(keys.digest_of(sources(copied).code([("made_up_for_names", "wrapper")])))
    for text in texts:
        (copied / "made_up_for_names.py").write_text(f"def wrapper(x):\n    {text}\n    return sure(x)\n")
        found.add(keys.digest_of(sources(copied).code([("made_up_for_names", "wrapper")])))
    assert len(found) == 2  # An import within a function is no other code.


MARKED = """
from trl_hotfix.authoring import act, act_of_this_call, judge


def wrapper(wrapped, instance, args, kwargs):
    act = act_of_this_call()
    if instance.on and any(name in args for name in "ab"):
        act()

    def later(value):
        act()
        return value

    if kwargs:
        act()
        return later(judge(*args))
    return wrapped(*args)
"""
UNMARKED = """
from trl_hotfix.authoring import judge


def wrapper(wrapped, instance, args, kwargs):
    def later(value):
        return value

    if kwargs:
        return later(judge(*args))
    return wrapped(*args)
"""


def key_of_text(copied: Path, text: str) -> str:
    (copied / "made_up_for_marks.py").write_text(text)
    return keys.digest_of(sources(copied).code([("made_up_for_marks", "wrapper")]))


def test_a_mark_is_no_part_of_the_key(copied: Path) -> None:
    assert key_of_text(copied, MARKED) == key_of_text(copied, UNMARKED)
    of_call = MARKED.replace("authoring import act, act_of_this_call,", "authoring import")
    of_call = f"from trl_hotfix.call import act, act_of_this_call\n{of_call}"
    assert key_of_text(copied, of_call) == key_of_text(copied, UNMARKED)


def test_a_mark_of_a_call_is_no_part_of_the_key(copied: Path) -> None:
    def key(*lines: str) -> str:
        body = "\n    ".join([*lines, "return call.with_(scale=2)()"])
        text = f"from trl_hotfix.authoring import Call, wrapper\n\n@wrapper\ndef scaled(call: Call):\n    {body}\n"
        (copied / "made_up_for_calls.py").write_text(text)
        return keys.digest_of(sources(copied).code([("made_up_for_calls", "scaled")]))

    assert key("call.act()", "act = call.act_later()", "act()") == key()
    assert len({key(), key("call.act(1)"), key("other.act()"), key("later = call.act_later()")}) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        act()\n        return later", "        act(1)\n        return later"),
        ("        act()\n        return later", "        args.act()\n        return later"),
        ("        act()\n        return later", "        later()\n        return later"),
        ("    act = act_of_this_call()", "    act = act_of_this_call(1)"),
        ("    act = act_of_this_call()", "    done = act_of_this_call()"),
        ('for name in "ab"):\n        act()', 'for name in "ab"):\n        act()\n        args = ()'),
        ('for name in "ab"):\n        act()', 'for name in "ab"):\n        act()\n    else:\n        args = ()'),
        ("if instance.on and any(", "if instance.turn_on() and any("),
        ("if instance.on and any(", "if (args := instance.on) and any("),
        ("import act, act_of_this_call, judge", "import judge\nfrom elsewhere import act, act_of_this_call"),
    ],
)
def test_what_is_not_exactly_a_mark_changes_the_key(copied: Path, old: str, new: str) -> None:
    assert old in MARKED
    assert key_of_text(copied, MARKED.replace(old, new)) != key_of_text(copied, UNMARKED)


@pytest.mark.parametrize("patch_id", [patch.id for patch in loading.load()])
def test_a_mark_in_front_of_every_statement_of_a_wrapper_changes_no_key(copied: Path, patch_id: str) -> None:
    entry, module = patch(patch_id), modules.module_of(patch_id)
    names = [target.wrapper for target in entry.targets]

    def key() -> str:
        return keys.digest_of(sources(copied).code((module, name) for name in names))

    path = copied / f"{module.replace('.', '/')}.py"
    before, text = key(), path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for definition in tree.body:
        if isinstance(definition, ast.FunctionDef) and definition.name in names:
            mark = ast.parse("act()").body
            definition.body = [definition.body[0], *(both for line in definition.body[1:] for both in (*mark, line))]
    # A wrapper that takes the act of its call has a variable of this name.
    if "act_of_this_call" not in text and "act_later" not in text:
        tree.body.insert(2, ast.parse("from ...call import act").body[0])
    try:
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
        assert path.read_text(encoding="utf-8").count("act()") >= len(set(names))
        assert key() == before
    finally:
        path.write_text(text, encoding="utf-8")


def test_the_engine_is_no_part_of_a_proof_that_asks_for_the_status(copied: Path, edit: Edit) -> None:
    def key() -> str:
        return keys.digest_of(sources(copied).code([("dpo_padding_free_liger", "train")]))

    before = key()
    edit("trl_hotfix/api.py", "def status(", UNUSED + "@unused\ndef status(")
    assert key() == before


def test_prose_is_no_part_of_the_policy() -> None:
    entry = patch()
    reworded = replace(entry, title="Other", why="other", how="other", not_repaired="other", hits=(), trl=">=0.29.0")
    assert keys.policy_of(reworded, entry.targets) == keys.policy_of(entry, entry.targets)


def test_each_decision_of_an_entry_is_part_of_the_policy() -> None:
    entry = patch()
    policy = keys.policy_of(entry, entry.targets)
    target = replace(entry.targets[0], wrapper="another")
    assert keys.policy_of(replace(entry, revision=9), entry.targets) != policy
    assert keys.policy_of(replace(entry, requires={"torch": ">=2"}), entry.targets) != policy
    assert keys.policy_of(replace(entry, targets=(target,)), (target,)) != policy
    assert keys.policy_of(entry, ()) != policy


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match="has no nothing_here"):
        sources(CHECKOUT).closure([(modules.module_of(ID), "nothing_here")])


@pytest.mark.parametrize("patch_id", [patch.id for patch in loading.load()])
def test_every_patch_and_every_proof_has_a_key(patch_id: str) -> None:
    entry, name = patch(patch_id), patch_id.replace("-", "_")
    here = sources(CHECKOUT)
    pieces = here.closure((modules.module_of(patch_id), target.wrapper) for target in entry.targets)
    assert all(module.startswith("trl_hotfix.") for module, _ in pieces)
    proof = here.closure([(name, "train")])
    assert any(module.partition(".")[0] == "tiny" for module, _ in proof)
