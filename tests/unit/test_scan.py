"""Which known bugs a script hits: by the text of real scripts, which are read and never run."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_hotfix import scripts
from trl_hotfix.catalogue import conditions, loading
from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.commands import Exit
from trl_hotfix.commands import scan as command
from trl_hotfix.errors import ScriptError
from trl_hotfix.matching import versions
from trl_hotfix.model import Hit, Patch, Severity, Upstream
from trl_hotfix.scan import Scanned, judge

PATCHES = loading.load()
DROPPED = "dpo-precomputed-ref-logps-dropped"


@pytest.fixture
def scan(tmp_path: Path) -> Any:
    """The trainers of a script, judged on a release."""

    def one(text: str, trl: str = "0.12.2", name: str = "train.py", trainer: str | None = None) -> list[Scanned]:
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return [judge(each, PATCHES, trl) for each in scripts.read(file, trainer)]

    return one


def hits(scanned: Scanned) -> set[str]:
    return {each.patch.id for each in scanned.hits}


def unsure(scanned: Scanned) -> dict[str, str]:
    return {each.patch.id: "; ".join(each.unknown) for each in scanned.unsure}


DPO = """\
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B")
    dataset = load_dataset("trl-lib/ultrafeedback_binarized")
    training_args = DPOConfig(output_dir="out", precompute_ref_log_probs=True)
    trainer = DPOTrainer(
        model=model, args=training_args, train_dataset=dataset["train"], processing_class=tokenizer
    )
    trainer.train()
"""


def test_a_script_that_hits_a_bug_is_told_which_and_where_and_why(scan: Any) -> None:
    (found,) = scan(DPO)
    (hit,) = found.hits
    assert (found.made.name, found.made.line) == ("DPO", 10)
    assert (hit.patch.id, hit.lines) == (DROPPED, (6, 9))
    assert hit.symptom.startswith("the loss stays at 0.6931")
    assert hit.because[:2] == ("precompute_ref_log_probs=True (line 9)", "ref_model is not given")
    assert hit.unknown == ()
    assert found.rest == len(PATCHES) - 1 - len(found.unsure)


@pytest.mark.parametrize(
    ("old", "new", "trl"),
    [
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=False", "0.12.2"),
        (", precompute_ref_log_probs=True", "", "0.12.2"),
        ("args=training_args", "args=training_args, peft_config=LoraConfig(r=8)", "0.12.2"),
        ("", "", "0.13.0"),
        ("", "", "0.11.4"),
    ],
)
def test_a_script_that_does_not_hit_it_is_not_told_so(scan: Any, old: str, new: str, trl: str) -> None:
    text = f"    from peft import LoraConfig\n{DPO.replace(old, new)}"
    (found,) = scan(text, trl)
    assert DROPPED not in hits(found) | unsure(found).keys()


def test_a_reference_of_ones_own_has_the_other_symptom(scan: Any) -> None:
    (found,) = scan(DPO.replace("model=model,", "model=model, ref_model=AutoModelForCausalLM.from_pretrained('x'),"))
    (hit,) = found.hits
    assert "every step computes the reference again" in hit.symptom


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=flag()", "flag() returns is not in the text"),
        ("precompute_ref_log_probs=True", "**options", "**options may set it"),
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=cli.x", "(cli.x): line 9"),
        ("model=model,", "model=model, ref_model=get_reference(),", "get_reference() returns is not in the text"),
        ("model=model,", "model=load(),", "load() returns is not in the text"),
        ("model=model,", "model=model, **more,", "**more may set it"),
        ("args=training_args", "args=parse()", "parse() returns is not in the text"),
    ],
)
def test_what_is_not_a_literal_cannot_be_told(scan: Any, old: str, new: str, why: str) -> None:
    (found,) = scan(DPO.replace(old, new))
    assert DROPPED not in hits(found)
    assert why in unsure(found)[DROPPED]


def test_what_no_script_says_cannot_be_told(scan: Any) -> None:
    (found,) = scan(DPO, "0.11.4")
    assert "if the model is a mixture of experts" in unsure(found)["moe-aux-loss-lost-under-deepspeed"]


def test_values_of_a_parser_are_not_in_the_text(scan: Any) -> None:
    (found,) = scan(
        """\
        from trl import DPOConfig, DPOTrainer, TrlParser
        def main(script_args, model_args):
            trainer = DPOTrainer(model_args.model_name_or_path, args=training_args)
        if __name__ == "__main__":
            parser = TrlParser((DPOConfig,))
            script_args, training_args, model_args = parser.parse_args_and_config()
            main(script_args, model_args)
        """
    )
    assert (
        "precompute_ref_log_probs is not a literal (training_args is a part of parser.parse" in unsure(found)[DROPPED]
    )
    assert "line 6" in unsure(found)[DROPPED]


@pytest.mark.parametrize(
    ("imported", "trainer", "config"),
    [
        ("from trl import DPOTrainer as T, DPOConfig as C", "T", "C"),
        ("import trl", "trl.DPOTrainer", "trl.DPOConfig"),
        ("import trl as t", "t.trainer.DPOTrainer", "t.DPOConfig"),
        ("import trl.trainer.dpo_trainer", "trl.trainer.dpo_trainer.DPOTrainer", "trl.DPOConfig"),
        ("from trl.trainer import dpo_trainer as d, DPOConfig", "d.DPOTrainer", "DPOConfig"),
        (
            "from trl.experimental.bema_for_ref_model import DPOTrainer\nfrom trl import DPOConfig",
            "DPOTrainer",
            "DPOConfig",
        ),
        ("import trl\nT = trl.DPOTrainer\nC = trl.DPOConfig", "T", "C"),
        (
            "try:\n    from trl import A\nexcept ImportError:\n    A = None\nfrom trl import *",
            "trl.DPOTrainer",
            "trl.C",
        ),
        (
            "from trl import DPOTrainer, DPOConfig\nclass Mine(DPOTrainer):\n    pass\nclass Ours(Mine): ...",
            "Ours",
            "DPOConfig",
        ),
    ],
)
def test_a_trainer_is_found_under_every_name(scan: Any, imported: str, trainer: str, config: str) -> None:
    if "import *" in imported:
        imported, config = "import trl", "trl.DPOConfig"
    (found,) = scan(f"{imported}\nt = {trainer}('gpt2', args={config}(precompute_ref_log_probs=True))\n")
    assert hits(found) == {DROPPED}
    assert (found.made.name, found.made.called) == (
        "DPO",
        trainer.rpartition(".")[2] if trainer != "T" else found.made.called,
    )


def test_a_trainer_of_another_package_is_none_of_trl(scan: Any) -> None:
    assert scan("from mine import DPOTrainer\nfrom transformers import Trainer\nDPOTrainer('x')\nTrainer('x')\n") == []


def test_a_constructor_of_ones_own_may_set_what_the_call_does_not(scan: Any) -> None:
    (found,) = scan(
        """\
        from trl import DPOConfig, DPOTrainer
        class Mine(DPOTrainer):
            def __init__(self, model, **options):
                super().__init__(model, ref_model=copy(model), **options)
        Mine("gpt2", args=DPOConfig(precompute_ref_log_probs=True))
        """
    )
    assert found.made.called == "Mine"
    assert "Mine.__init__ may set it" in unsure(found)[DROPPED]


@pytest.mark.parametrize(
    "config",
    [
        "args = DPOConfig(precompute_ref_log_probs=not False)",
        "on = True\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "args = DPOConfig()\nargs.precompute_ref_log_probs = True",
        "args = DPOConfig(**{'precompute_ref_log_probs': True})",
        "options = dict(precompute_ref_log_probs=True)\nargs = DPOConfig(**options)",
        "args = DPOConfig(beta=1)\nargs = DPOConfig(precompute_ref_log_probs=True)",
        "class Mine(DPOConfig):\n    precompute_ref_log_probs: bool = True\nargs = Mine()",
        "first = DPOConfig(precompute_ref_log_probs=True)\nargs = first",
        "args, other = DPOConfig(precompute_ref_log_probs=True), 1",
    ],
)
def test_an_argument_is_followed_to_where_it_is_set(scan: Any, config: str) -> None:
    (found,) = scan(f"from trl import DPOConfig, DPOTrainer\n{config}\nDPOTrainer('gpt2', args=args)\n")
    assert hits(found) == {DROPPED}


@pytest.mark.parametrize(
    "config",
    [
        "on = True\non = False\ndef f():\n    return on\nargs = DPOConfig(precompute_ref_log_probs=f())",
        "args = DPOConfig()\nif x:\n    args.precompute_ref_log_probs = True",
        "args = DPOConfig(precompute_ref_log_probs=True)\nif x:\n    args = DPOConfig()",
        "for on in (True, False):\n    pass\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "args = DPOConfig(precompute_ref_log_probs=a if b else c)",
        "with open('x') as on:\n    pass\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "def f(on):\n    global args\n    args = DPOConfig(precompute_ref_log_probs=on)",
        "args = None if x else DPOConfig()",
    ],
)
def test_an_argument_that_the_text_leaves_open_is_unknown(scan: Any, config: str) -> None:
    (found,) = scan(f"from trl import DPOConfig, DPOTrainer\n{config}\nDPOTrainer('gpt2', args=args)\n")
    assert hits(found) == set()
    assert DROPPED in unsure(found)


def test_each_trainer_of_a_file_has_its_own_config_and_model(scan: Any) -> None:
    text = """\
        from peft import get_peft_model, LoraConfig
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
        def first():
            args = SFTConfig(packing=True)
            SFTTrainer("gpt2", args, None).train()
        def second(steps):
            args = GRPOConfig(steps_per_generation=16, gradient_accumulation_steps=4 * 1, use_vllm=True)
            model = AutoModelForCausalLM.from_pretrained("gpt2").to("cuda")
            model = get_peft_model(model, LoraConfig())
            GRPOTrainer(model, [len], args).train()
        """
    sft, grpo = scan(text, "0.22.0")
    assert [each.made.name for each in (sft, grpo)] == ["SFT", "GRPO"]
    assert "sft-padding-free-contamination" in hits(sft)
    assert "grpo-dapo-normaliser" in hits(grpo)
    assert "sft-padding-free-contamination" not in hits(grpo)
    (found,) = (each for each in grpo.hits if each.patch.id == "grpo-dapo-normaliser")
    assert "steps_per_generation=16 (line 8)" in found.because
    _, older = scan(text, "0.15.0")
    assert "grpo-vllm-base-weights" in {*hits(older), *unsure(older)}
    _, equal = scan(text.replace("=16", "=4"), "0.22.0")
    assert "grpo-dapo-normaliser" not in hits(equal)


def test_callbacks_are_seen_in_the_call_and_when_they_are_added(scan: Any) -> None:
    text = """\
        from peft import LoraConfig
        from trl import BEMACallback, SFTTrainer
        trainer = SFTTrainer("gpt2", peft_config=LoraConfig(){})
        {}
        """
    for given_, added in ((", callbacks=[BEMACallback()]", ""), ("", "trainer.add_callback(BEMACallback())")):
        (found,) = scan(text.format(given_, added), "1.0.0")
        assert "bema-callback-frozen-parameters" in hits(found)
    (found,) = scan(text.format("", ""), "1.0.0")
    assert "bema-callback-frozen-parameters" not in hits(found) | unsure(found).keys()


def test_an_argument_of_what_makes_the_model_is_seen(scan: Any) -> None:
    text = """\
        import torch
        from transformers import AutoModelForCausalLM
        from trl import DPOTrainer
        DPOTrainer(AutoModelForCausalLM.from_pretrained("x", {}))
        """
    (found,) = scan(text.format("torch_dtype=torch.bfloat16"), "1.0.0")
    assert "ref-model-dtype-mismatch" in hits(found)
    (found,) = scan(text.format("torch_dtype=torch.float32"), "1.0.0")
    assert "ref-model-dtype-mismatch" not in hits(found) | unsure(found).keys()
    (found,) = scan(text.format("revision='main'"), "1.0.0")
    assert "the model is not in float32" in unsure(found)["ref-model-dtype-mismatch"]


# A config of the command line


def test_a_config_is_scanned_for_the_trainer_that_its_keys_tell(scan: Any) -> None:
    text = "model_name_or_path: gpt2\npacking: true\ngradient_accumulation_steps: 8\n"
    (found,) = scan(text, "0.20.0", "sft.yaml")
    assert (found.made.name, found.made.called) == ("SFT", "trl sft")
    (hit,) = (each for each in found.hits if each.patch.id == "sft-padding-free-contamination")
    assert hit.lines == (2,)


def test_a_config_is_scanned_for_the_trainer_that_is_named(scan: Any) -> None:
    text = "model_name_or_path: gpt2\nprecompute_ref_log_probs: true\nuse_peft: false\n"
    with pytest.raises(ScriptError, match="its keys do not tell the trainer; name it, as in --trainer DPO"):
        scan(text, "0.12.2", "x.yaml")
    (found,) = scan(text, "0.12.2", "x.yaml", "DPO")
    assert "trl dpo makes it, and its script is not in this file" in unsure(found)[DROPPED]
    (found,) = scan(text.replace("false", "true"), "0.12.2", "x.yml", "DPO")
    assert DROPPED not in hits(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packing: true\nrpo_alpha: 1\n", "keys of several trainers (packing of SFT; rpo_alpha of DPO)"),
        ("- a\n", "expected a config of TRL's command line"),
        ("", "expected a config of TRL's command line"),
        ("a: [\n", "line 2 is not YAML"),
        ("a: !!python/name:os.system x\n", "is not YAML"),
        ("a: 2026-02-31\n", "is not YAML"),
    ],
)
def test_a_config_that_is_none_is_one_clear_error(scan: Any, text: str, said: str) -> None:
    with pytest.raises(ScriptError) as caught:
        scan(text, "0.12.2", "x.yaml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# Other releases, and what is installed beside


@pytest.mark.parametrize(
    ("trl", "answer"),
    [
        ("0.13.0.dev0", "cannot tell"),
        ("0.12.0.dev0", "cannot tell"),
        ("0.12.3.dev0", "hit"),
        ("0.14.0.dev0", "not hit"),
    ],
)
def test_a_development_version_on_the_border_cannot_be_told(scan: Any, trl: str, answer: str) -> None:
    (found,) = scan(DPO, trl)
    said = "hit" if DROPPED in hits(found) else "cannot tell" if DROPPED in unsure(found) else "not hit"
    assert said == answer
    if answer == "cannot tell":
        assert f"TRL {trl} is no release" in unsure(found)[DROPPED]


def test_what_another_distribution_decides(scan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "sft-loss-normaliser-counts-first-token"
    file = tmp_path / "x.py"
    file.write_text("from trl import SFTTrainer\nSFTTrainer('gpt2')\n")
    (made,) = scripts.read(file)
    for version, elsewhere, told in (("4.50.0", False, "hit"), ("4.44.0", False, "not"), ("4.44.0", True, "cannot")):
        monkeypatch.setattr(versions, "installed", lambda distribution, version=version: version)
        found = judge(made, PATCHES, "1.0.0", elsewhere=elsewhere)
        said = "hit" if name in hits(found) else "cannot" if name in unsure(found) else "not"
        assert said == told
    assert unsure(found)[name] == "needs transformers >=4.46.0,<5.11, and here is 4.44.0"


def test_a_patch_that_does_not_say_what_its_bug_needs_cannot_be_told(tmp_path: Path) -> None:
    silent = Patch("p/x", 1, "A bug", Severity.CRASH, ">=0.9.6", Upstream(), "", "", (), "")
    file = tmp_path / "x.py"
    file.write_text("import trl\ntrl.SFTTrainer('gpt2')\n")
    (made,) = scripts.read(file)
    assert unsure(judge(made, [silent], "1.0.0")) == {"p/x": "the patch does not say what its bug needs"}


def test_the_worst_comes_first(scan: Any) -> None:
    (found,) = scan("from trl import OnlineDPOTrainer\nOnlineDPOTrainer('x', args=None)\n", "1.0.0")
    order = [list(Severity).index(each.patch.severity) for each in (*found.hits,)]
    assert order == sorted(order)


# The value language


@pytest.mark.parametrize(
    ("wanted", "value", "answer"),
    [
        (True, True, True),
        (True, False, False),
        ("sft", ["sigmoid", "sft"], True),
        ("sft", ["sigmoid"], False),
        (">1", 2, True),
        (">1", 1, False),
        (">1", "1e3", True),
        (">1", "many", False),
        ("!=text", "text", False),
        ("!=text", "content", True),
        ("!=0", 0.0, False),
        ("set", 0, True),
        ("set", None, False),
        ("unset", None, True),
        (None, None, True),
        (None, 1, False),
        ("text", "a", True),
        ("object", "a", False),
        (["unset", ">3"], 4, True),
        (["unset", ">3"], 3, False),
        ("by *peft*", "peft", False),
        ("!=@other", 3, True),
        ("!=@other", 2, False),
    ],
)
def test_a_literal_holds_or_not(wanted: Any, value: Any, answer: bool) -> None:
    assert conditions.validation_error(wanted) is None
    given_ = Argument(Kind.LITERAL, value)
    assert conditions.evaluate(wanted, given_, lambda name: Argument(Kind.LITERAL, {"other": 2}[name])) is answer


@pytest.mark.parametrize(
    ("wanted", "unset", "model", "part"),
    [
        ("set", False, True, True),
        ("unset", True, False, False),
        ("object", False, True, True),
        ("text", False, False, False),
        ("by *peft*", False, True, None),
        ("not by *peft*", False, False, None),
        ("by Other, get_*", False, False, None),
        (True, False, None, None),
        (None, False, False, False),
        (">1", False, None, None),
        (["unset", True], True, None, None),
    ],
)
def test_what_is_not_given_and_what_is_an_object(
    wanted: Any, unset: bool, model: bool | None, part: bool | None
) -> None:
    objects = [
        Argument(Kind.UNSET),
        Argument(Kind.OBJECT, by=("peft.PeftModel.from_pretrained",)),
        Argument(Kind.OBJECT, by=("Mine",), whole=False),
    ]
    assert [conditions.evaluate(wanted, each, lambda _: objects[0]) for each in objects] == [unset, model, part]
    assert conditions.evaluate(wanted, Argument(Kind.UNKNOWN), lambda _: objects[0]) is None


WANTED = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
SAID = st.builds(Argument, st.sampled_from(Kind), st.one_of(WANTED, st.lists(WANTED, max_size=3)), by=st.just(("a.B",)))


@given(st.one_of(WANTED, st.lists(WANTED, max_size=3)), SAID, SAID)
@settings(deadline=None)
def test_whatever_is_no_mistake_has_an_answer(wanted: Any, argument: Argument, other: Argument) -> None:
    if conditions.validation_error(wanted) is None:
        assert conditions.evaluate(wanted, argument, lambda _: other) in (True, False, None)


# Any Python file


def _files() -> list[Path]:
    folders = [Path(spec.origin).parent for name in ("trl",) if (spec := find_spec(name)) and spec.origin]
    every = [file for folder in folders for file in folder.rglob("*.py")]
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return [*every, Path(spec.origin).with_name("trainer.py"), *Path(__file__).parent.glob("*.py")]


def test_every_python_file_is_scanned_without_an_error() -> None:
    files = _files()
    assert len(files) > 50
    found = [judge(made, PATCHES, "0.11.4") for file in files for made in scripts.read(file)]
    assert {each.made.name for each in found} >= {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward"}


@pytest.mark.parametrize(
    "text",
    [
        "from trl import DPOTrainer\nx = " + "(" * 60 + "1" + ")" * 60 + "\nDPOTrainer(x)",
        "from trl import DPOTrainer\nx = " + " + ".join(["1"] * 900) + "\nDPOTrainer(x, args=x)",
        "from trl import DPOTrainer\nx = x\nDPOTrainer(x, args=x)\ny = z\nz = y\nDPOTrainer(y, args=z)",
        "from trl import DPOTrainer\nDPOTrainer = DPOTrainer\nDPOTrainer(1)",
        "from trl import DPOTrainer\nclass A(B): ...\nclass B(A, DPOTrainer): ...\nA(*x, **y)\nB(*x)(1)",
        "from trl import DPOTrainer\nDPOTrainer(1 / 0, args=DPOTrainer, **{**a, 1: 2})\nDPOTrainer(*DPOTrainer())",
        "match x:\n    case {'a': y, **rest}:\n        y = 1\n    case [1, *z] as w:\n        pass",
        "async def f(a, /, *b, c=1, **d):\n    async for a.b in c: 1\n    del a, a.b, a[0]\n    a += 1\n    a.b += 1",
        "nonsense = [y := 1 for x in (lambda z: z)(1)]\nx: int\nx.y: int = 1\nfor x[0], *y in z: pass",
        "from trl import DPOTrainer\nDPOTrainer(args=10 ** 10 ** 10, model=1 << 10 ** 9, x='a' * 10 ** 12)",
    ],
)
def test_odd_python_is_scanned_without_an_error(scan: Any, text: str) -> None:
    for each in scan(text):
        assert each.rest >= 0


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command.command, list(arguments), standalone_mode=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(DPO))
    return file


def test_the_screen_has_a_section_for_each_trainer_hits_first(script: Path) -> None:
    done = run(str(script), "--trl", "0.12.2")
    assert done.exception is None
    assert done.return_value is Exit.DEGRADED
    lines = done.output.splitlines()
    assert lines[0] == f"{script}, line 10: DPOTrainer on TRL 0.12.2"
    order = [line.split()[0] for line in lines if DROPPED in line or "dpo-extra-eos-conversational" in line]
    assert order == ["hit", "cannot"]
    assert "on by default" in done.output
    assert lines[-2].startswith("1 hit, 1 cannot be told; 42 of the 44 known bugs") or len(PATCHES) != 44


def test_the_answer_as_data_has_the_declared_shape(script: Path) -> None:
    answer = json.loads(run(str(script), "--trl", "0.12.2", "--json").output)
    assert list(answer) == list(command.Answer.__annotations__)
    (trainer,) = answer["trainers"]
    assert list(trainer) == list(command.Trainer.__annotations__)
    (hit,) = trainer["hits"]
    assert list(hit) == list(command.Bug.__annotations__)
    assert (hit["id"], hit["lines"], hit["on_by_default"]) == (DROPPED, [6, 9], True)
    assert trainer["rest"] + len(trainer["hits"]) + len(trainer["cannot_tell"]) == len(PATCHES)


def test_nothing_hit_and_nothing_untold_is_exit_0(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from trl import RewardTrainer\nRewardTrainer('gpt2')\n")
    done = run(str(file), "--trl", "1.16.0")
    assert done.return_value is Exit.FINE
    assert "0 hit, 0 cannot be told" in done.output


def test_a_file_without_a_trainer_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("print('nothing')\nraise SystemExit(7)\n")
    done = run(str(file), "--trl", "0.12.2")
    assert done.return_value is Exit.DEGRADED
    assert done.output == f"{file}: no trainer of TRL is made in it\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.py", None, "cannot be read: No such file or directory"),
        ("bad.py", b"def f(:\n", "line 1 is not Python"),
        ("bad.py", b"x = 'a\n", "line 1 is not Python"),
        ("null.py", b"a\0b", "is not Python"),
        ("latin.py", b"x = '\xff'\n", "is not Python"),
        ("book.ipynb", b"{}", "a notebook can be saved as a script (.py)"),
        ("x.yaml", b"output_dir: x\n", "name it, as in --trainer DPO"),
    ],
)
def test_a_file_that_cannot_be_scanned_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    done = run(str(file), "--trl", "0.12.2")
    assert done.exception is not None
    assert said in done.exception.format_message()
    assert "\n" not in done.exception.format_message()
    assert done.exception.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trl", "newest"), "'newest' is not a version such as 0.12.2"),
        (("--trl", "0.12.7"), "there is no TRL 0.12.7; did you mean '0.12."),
        (("--trainer", "DPO"), "--trainer is for a YAML config"),
    ],
)
def test_wrong_usage_is_told(script: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(str(script), *arguments)
    assert said in done.exception.format_message()


def test_an_unknown_trainer_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("output_dir: x\n")
    assert "no trainer 'DPOO' is known; did you mean 'DPO'?" in run(str(file), "--trainer", "DPOO").exception.message
    assert run(str(file), "--trainer", "dpotrainer", "--trl", "0.12.2").return_value is Exit.DEGRADED


@pytest.mark.parametrize(("found", "trl"), [(None, None), ("0.9.4", None), ("1.0.0", "0.8.0")])
def test_no_trl_is_exit_4(script: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, trl: str | None) -> None:
    monkeypatch.setattr(versions, "installed", lambda distribution: found)
    done = run(str(script), *(("--trl", trl) if trl else ()))
    assert done.return_value is Exit.NO_TRL
    assert "as in --trl 0.12.2" in done.output


def test_the_installed_release_is_the_one_that_is_asked_of(script: Path) -> None:
    answer = json.loads(run(str(script), "--json").output)
    assert answer["trl"] == versions.installed("trl")


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = tmp_path / "x.py"
    file.write_text(f"import no_such_module\nopen({str(made)!r}, 'w')\nfrom trl import DPOTrainer\nDPOTrainer('x')\n")
    before = set(sys.modules)
    run(str(file), "--trl", "0.12.2")
    assert not made.exists()
    assert not {"trl", "torch", "transformers"} & (set(sys.modules) - before)


def test_a_hit_is_declared_with_its_trainers_and_its_symptom() -> None:
    for patch in PATCHES:
        assert patch.hits, patch.id
        for hit in patch.hits:
            assert isinstance(hit, Hit)
            assert hit.trainers
            assert hit.symptom
