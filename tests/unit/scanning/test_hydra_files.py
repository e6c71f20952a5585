"""What the scan says of a part of a config is what OmegaConf and Hydra give the script, or nothing.

They are not among the packages of the tests. omegaconf 2.3.1 and hydra-core 1.3.8 gave the values below by hand.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.scanning.beside import Beside
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.scopes import ScopedExpression
from trl_hotfix.scanning.values import keyword_arguments, value_of

CONFIG = """\
model: gpt2
small: 1e-5
smaller: 1E-5
dotted: 1.e-5
signed: -3e4
under: 1_000
text: '1e-5'
octal: 010
minutes: 1:30
day: 2024-01-02
yes_word: yes
off_word: off
nothing:
tilde: ~
given: ???
from_trainer: ${trainer.beta}
twice: ${from_trainer}
to_part: ${trainer}
relative: ${.model}
of_environment: ${oc.env:HOME}
joined: a${model}
gone: ${no.such}
round: ${round}
names: [a, b]
base: &base {x: 1, y: 2}
merged:
  <<: *base
  y: 3
trainer:
  beta: 0.1
  name: dpo
  inner: {deep: 4}
fixed: {refers: "${trainer.beta}"}
"""

HYDRA = """\
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    pass

main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(CONFIG)
    return tmp_path / "train.py"


def made(script: Path, text: str, words: str | None) -> ScriptBindings:
    return ScriptBindings(ast.parse(text), words.split() if words is not None else None, Beside(script))


def told(script: Path, expression: str, words: str | None = "", text: str = HYDRA, body: str = "pass") -> Argument:
    bound = made(script, text.replace("    pass\n", f"    {body}\n    use({expression})\n"), words)
    (place,) = [place for place in bound.calls if ast.unparse(place.node).startswith("use(")]
    assert isinstance(place.node, ast.Call)
    return value_of(ScopedExpression(place.node.args[0], place.scope, place.line))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("cfg.model", "gpt2"),
        ("cfg['model']", "gpt2"),
        ("cfg.get('model')", "gpt2"),
        ("cfg.trainer.get('beta', 3)", 0.1),
        ("cfg.trainer.beta", 0.1),
        ("cfg['trainer']['beta']", 0.1),
        ("cfg.trainer['inner'].deep", 4),
        ("cfg.small", 1e-5),
        ("cfg.smaller", 1e-5),
        ("cfg.dotted", 1e-5),
        ("cfg.signed", -3e4),
        ("cfg.under", 1000),
        ("cfg.text", "1e-5"),
        ("cfg.octal", 8),
        ("cfg.minutes", 90),
        ("cfg.day", "2024-01-02"),
        ("cfg.yes_word", True),
        ("cfg.off_word", False),
        ("cfg.nothing", None),
        ("cfg.tilde", None),
        ("cfg.from_trainer", 0.1),
        ("cfg.twice", 0.1),
        ("cfg.merged.x", 1),
        ("cfg.merged.y", 3),
        ("cfg.base.y", 2),
        ("OmegaConf.to_container(cfg.trainer)['beta']", 0.1),
        ("OmegaConf.to_container(cfg)['names']", ["a", "b"]),
        ("OmegaConf.to_container(cfg.fixed, resolve=True)['refers']", 0.1),
        ("OmegaConf.to_object(cfg.fixed)['refers']", 0.1),
    ],
)
def test_a_part_of_the_file(script: Path, expression: str, expected: Any) -> None:
    found = told(script, expression)
    assert (found.kind, found.value, type(found.value)) == (Kind.LITERAL, expected, type(expected))


@pytest.mark.parametrize(
    "expression",
    [
        *("cfg.given", "cfg.to_part", "cfg.relative", "cfg.of_environment", "cfg.joined", "cfg.gone", "cfg.round"),
        *("cfg.names", "cfg.trainer", "cfg.trainer.none", "cfg.to_part.beta", "cfg.names[0]", "cfg.trainer.keys"),
        *(
            "OmegaConf.to_container(cfg)['from_trainer']",
            "OmegaConf.to_container(cfg)['given']",
            "cfg.get('other', 3)",
            "cfg.get('nothing', 3)",
        ),
    ],
)
def test_what_the_file_does_not_tell_is_unknown(script: Path, expression: str) -> None:
    assert told(script, expression).kind is Kind.UNKNOWN


def test_a_value_has_its_place(script: Path) -> None:
    assert told(script, "cfg.trainer.beta").place == "conf/train.yaml, line 30"
    assert told(script, "cfg.from_trainer").place == "conf/train.yaml, line 30"
    assert told(script, "cfg.trainer.beta", "trainer.beta=3").place == "the command line"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainer.beta=0.2", 0.2),
        ("trainer.beta=1e-5", 1e-5),
        ("trainer.beta=-2", -2),
        ("trainer.beta=1.", 1.0),
        ("trainer.beta=.5", 0.5),
        ("trainer.beta=true", True),
        ("trainer.beta=FALSE", False),
        ("trainer.beta=null", None),
        ("trainer.beta=yes", "yes"),
        ("trainer.beta=gpt2", "gpt2"),
        ("trainer.beta=meta-llama/Llama-3.2", "meta-llama/Llama-3.2"),
        ("trainer.beta=v1.10", "v1.10"),
        ("++trainer.beta=2", 2),
        ("hydra.run.dir=x", 0.1),
        ("model=other", 0.1),
        ("+trainer.other=1", 0.1),
        ("trainer.beta=1 trainer.beta=2", 2),
        # Not read.
        ("trainer.beta=[1,2]", ...),
        ("trainer.beta=1,2", ...),
        ("trainer.beta='1'", ...),
        ("trainer.beta=${model}", ...),
        ("trainer.beta=", ...),
        ("trainer.beta=010", ...),
        ("trainer.beta=1_000", ...),
        ("trainer.beta=1.e5", 1e5),
        (f"trainer.beta={'9' * 200}", ...),
        (f"{'x' * 5000}=1", ...),
        ("trainer=x", ...),
        ("~trainer.beta", ...),
        ("--config-name=other", ...),
        ("-m", ...),
        ("--multirun", ...),
        ("hydra.searchpath=[x]", ...),
        ("trainer@x=3", ...),
        ("model.part=3", ...),
        # Refused.
        ("trainer.gone=3", ...),
        ("gone.beta=3", ...),
        ("+trainer.beta=3", ...),
    ],
)
def test_overrides_of_hydra(script: Path, word: str, expected: Any) -> None:
    found = told(script, "cfg.trainer.beta", word)
    if expected is ...:
        assert found.kind is Kind.UNKNOWN
    else:
        assert (found.kind, found.value, type(found.value)) == (Kind.LITERAL, expected, type(expected))


def test_more_overrides(script: Path) -> None:
    assert told(script, "cfg.trainer.new", "+trainer.new=1").value == 1
    assert told(script, "cfg.a.b", "+a.b=1").value == 1
    assert told(script, "cfg.given", "+given=1").value == 1
    assert told(script, "cfg.given", "given=1").value == 1
    assert told(script, "cfg.nothing", "+nothing=1").value == 1
    assert told(script, "cfg.from_trainer", "trainer.beta=3").value == 3
    assert told(script, "cfg.merged.x", "base.x=5").value == 1
    assert math.isinf(told(script, "cfg.model", "model=inf").value)
    (script.parent / "conf" / "model").mkdir()
    assert "may choose a file of model" in told(script, "cfg.model", "model=a").reason


def test_without_words_the_command_line_may_set_it(script: Path) -> None:
    found = told(script, "cfg.trainer.beta", None)
    expected = "cfg.trainer.beta is of the command line, with the default 0.1 (conf/train.yaml, line 30)"
    assert (found.kind, found.reason) == (Kind.UNKNOWN, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@hydra", "@other\n@hydra"),
        ("main()", "main(config)"),
        ("main()", "run(main)"),
        ("import hydra", "import hydra, sys\nsys.argv.append('model=x')"),
        ("import hydra", "import hydra\nfrom hydra.core.config_store import ConfigStore"),
        ('config_path="conf"', "config_path=None"),
        ('config_path="conf"', "config_path=folder"),
        ('config_path="conf", ', ""),
        ('config_path="conf"', 'config_path="pkg://conf"'),
        ('config_path="conf"', 'config_path="/etc"'),
        ('config_path="conf"', 'config_path="../../../../../../.."'),
        ('config_name="train"', "config_name=NAME"),
        ('config_name="train"', 'config_name="gone"'),
        ('config_name="train"', 'config_name="../conf/train"'),
    ],
)
def test_what_may_give_another_config_leaves_it_unknown(script: Path, old: str, new: str) -> None:
    assert old in HYDRA
    before, after = HYDRA.rsplit(old, 1)
    assert told(script, "cfg.model", "", f"{before}{new}{after}").kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [_self_, db: x]\nmodel: a",
        "defaults:\n  - db\nmodel: a",
        "hydra: {mode: MULTIRUN, sweeper: {params: {model: 'a,b'}}}\nmodel: a",
        "# @package trainer\nmodel: a",
        "model: a\nmodel: b",
        "model: [",
        "- model",
        "",
        "model: !!python/name:os.system\n",
    ],
)
def test_a_file_that_is_more_than_its_values(script: Path, text: str) -> None:
    (script.parent / "conf" / "train.yaml").write_text(text)
    assert told(script, "cfg.model").kind is Kind.UNKNOWN
    assert "is of the command line, and " in told(script, "cfg.model").reason


def test_what_hydra_keeps_to_itself(script: Path) -> None:
    (script.parent / "conf" / "train.yaml").write_text("defaults: [_self_]\nhydra: {run: {dir: x}}\nmodel: a\n")
    assert told(script, "cfg.model").value == "a"
    assert told(script, "cfg.hydra.run.dir").kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    "body",
    [
        *("print(OmegaConf.to_yaml(cfg))", "print(cfg.model)", "assert cfg.trainer", "cfg.model = 'x'"),
        *("f(cfg.model)", "f(**cfg.trainer.inner)", "OmegaConf.set_struct(cfg, False)", "OmegaConf.resolve(cfg)"),
        *("x = cfg.trainer.inner", "cfg.trainer.inner.deep = 3", "f(dict(cfg.trainer))", "x = cfg.get('model')"),
        *("f(OmegaConf.to_container(cfg))", "cfg.trainer.inner.update(x=1)", "cfg.model.lower()", "del cfg.names"),
    ],
)
def test_what_leaves_a_value_as_it_is(script: Path, body: str) -> None:
    assert told(script, "cfg.trainer.beta", body=body).value == 0.1


@pytest.mark.parametrize(
    "body",
    [
        *("cfg.trainer.beta = 2", "cfg['trainer']['beta'] = 2", "cfg.trainer = x", "cfg = f(cfg)", "f(cfg)"),
        *("f(cfg.trainer)", "f(x=cfg.trainer)", "cfg.trainer.beta *= 2", "t = cfg.trainer; t.beta = 2", "f(**cfg)"),
        *("del cfg.trainer.beta", "cfg.merge_with(x)", "cfg.trainer.update(beta=2)", "cfg.trainer.pop('beta')"),
        *(
            "setattr(cfg.trainer, 'beta', 2)",
            "OmegaConf.update(cfg, 'trainer.beta', 2)",
            "x = [cfg]",
            "x = y = cfg; f(y)",
        ),
        *(
            "m = cfg.trainer.update; m(beta=2)",
            "cfg.__dict__['_content'] = x",
            "cfg._content.clear()",
            "cfg['trainer'][k] = 2",
        ),
        *(
            "for k, v in cfg.items(): f(v)",
            "cfg.get('trainer').beta = 2",
            "f(dict(cfg))",
            "cfg.trainer |= x",
            "x.y = cfg",
        ),
        *("cfg |= x", "(lambda: f(cfg))()", "global g; g = cfg; h(g)", "cfg.trainer[k].x = 2", "f(*cfg.trainer)"),
    ],
)
def test_what_may_change_a_value_leaves_it_unknown(script: Path, body: str) -> None:
    assert told(script, "cfg.trainer.beta", body=body).kind is Kind.UNKNOWN


def test_a_reference_is_what_it_refers_to_when_the_script_runs(script: Path) -> None:
    assert told(script, "cfg.from_trainer", body="cfg.trainer.beta = 2").kind is Kind.UNKNOWN
    assert told(script, "cfg.from_trainer", body="cfg.model = 2").value == 0.1


def test_a_config_is_followed_into_functions_and_names(script: Path) -> None:
    text = (
        HYDRA.replace("def main(cfg):\n    pass\n", "def main(cfg):\n    train(cfg)\n") + "\ndef train(c):\n    pass\n"
    )
    assert told(script, "c.trainer.beta", text=text).value == 0.1
    assert told(script, "c.trainer.beta", text=text, body="c.trainer.beta = 2").kind is Kind.UNKNOWN
    other = text.replace("    train(cfg)\n", "    train(cfg)\n    cfg.trainer.beta = 3\n")
    assert told(script, "c.trainer.beta", text=other).kind is Kind.UNKNOWN
    assert told(script, "t.beta", body="t = cfg.trainer").value == 0.1
    assert told(script, "t.beta", body="t = cfg.trainer; cfg.trainer.beta = 2").kind is Kind.UNKNOWN


def unpacked(script: Path, given: str, words: str | None = "", body: str = "pass") -> dict[str, Any] | None:
    bound = made(script, HYDRA.replace("    pass\n", f"    {body}\n    use(**{given})\n"), words)
    (place,) = [place for place in bound.calls if ast.unparse(place.node).startswith("use(")]
    assert isinstance(place.node, ast.Call)
    arguments, unknown = keyword_arguments(place.node, place.scope, place.line)
    values = {name: value_of(expression) for name, expression in arguments.items()}
    return None if unknown is not None else {k: v.value if v.kind is Kind.LITERAL else ... for k, v in values.items()}


def test_a_mapping_of_the_config_is_unpacked(script: Path) -> None:
    whole = {"beta": 0.1, "name": "dpo", "inner": ...}
    assert unpacked(script, "cfg.trainer") == whole
    assert unpacked(script, "OmegaConf.to_container(cfg.trainer, resolve=True)") == whole
    assert unpacked(script, "dict(cfg.trainer)") == whole
    assert unpacked(script, "cfg.trainer", "+trainer.more=1") == {**whole, "more": 1}
    assert unpacked(script, "cfg.trainer", None) is None
    assert unpacked(script, "cfg.gone") is None
    assert unpacked(script, "cfg.trainer", body="cfg.trainer.beta = 2") == {**whole, "beta": ...}
    assert unpacked(script, "cfg.trainer", body="cfg.trainer.more = 2") is None
    assert unpacked(script, "cfg.trainer", body="f(cfg)") is None


def test_a_copy_of_plain_dicts_is_changed_by_its_own_name(script: Path) -> None:
    copy = "o = OmegaConf.to_container(cfg.trainer)"
    assert unpacked(script, "o", body=f"{copy}; o['beta'] = 2") is not None
    assert unpacked(script, "o", body=f"{copy}\n    o['beta'] = 2") == {"beta": 2, "name": "dpo", "inner": ...}
    assert unpacked(script, "o", body=f"{copy}\n    o['more'] = 2\n    x = 1")["more"] == 2  # type: ignore[index]
    assert unpacked(script, "o", body=f"{copy}\n    o.update(x)") is None
    assert unpacked(script, "o", body=f"{copy}\n    o.pop('beta')") is None
    assert unpacked(script, "o", body=f"cfg.trainer.beta = 2\n    {copy}") == {"beta": ..., "name": "dpo", "inner": ...}


LOAD = "from omegaconf import OmegaConf\nimport os\nfrom pathlib import Path\ncfg = {}\nif 1:\n    pass\n"


@pytest.mark.parametrize(
    "load",
    [
        "OmegaConf.load('conf/train.yaml')",
        "OmegaConf.load(Path(__file__).parent / 'conf/train.yaml')",
        "OmegaConf.load(os.path.join(os.path.dirname(__file__), 'conf/train.yaml'))",
    ],
)
def test_a_file_by_name(script: Path, load: str) -> None:
    text = LOAD.format(load)
    assert told(script, "cfg.trainer.beta", None, text).value == 0.1
    assert told(script, "cfg.trainer.beta", None, text, body="cfg.trainer.beta = 2").kind is Kind.UNKNOWN
    returned = text.replace("cfg = ", "def read():\n    c = ").replace("\nif", "\n    return c\ncfg = read()\nif")
    assert told(script, "cfg.trainer.beta", None, returned).value == 0.1


@pytest.mark.parametrize(
    "load",
    [
        *(
            "OmegaConf.load(name)",
            "OmegaConf.load('gone.yaml')",
            f"OmegaConf.load('{'x' * 5000}')",
            "OmegaConf.load(f'{x}.yaml')",
            "OmegaConf.load()",
        ),
        *(
            "OmegaConf.load('/etc/x.yaml')",
            "OmegaConf.merge(OmegaConf.load('conf/train.yaml'), x)",
            "OmegaConf.create()",
        ),
    ],
)
def test_a_file_that_the_text_does_not_tell(script: Path, load: str) -> None:
    assert told(script, "cfg.trainer.beta", None, LOAD.format(load)).kind is Kind.UNKNOWN


def test_a_file_beside_the_script_and_another_one_here(script: Path, tmp_path: Path, monkeypatch: Any) -> None:
    here = tmp_path / "here" / "conf"
    here.mkdir(parents=True)
    monkeypatch.chdir(here.parent)
    text = LOAD.format("OmegaConf.load('conf/train.yaml')")
    assert told(script, "cfg.model", None, text).value == "gpt2"
    for change in ("import os as o\no.chdir('x')\n", "from os import chdir\n", "import hydra\n"):
        assert told(script, "cfg.model", None, change + text).kind is Kind.UNKNOWN
    (here / "train.yaml").write_text("model: other\n")
    assert told(script, "cfg.model", None, text).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", 0.1),
        ("trainer.beta=0.2", 0.2),
        ("trainer.beta=yes", True),
        ("trainer.beta=1e-5", 1e-5),
        ("trainer.new=1", 0.1),
        ("trainer=1", ...),
        ("trainer.beta", ...),
        ("--trainer.beta=1", ...),
        ("trainer.beta=[1]", ...),
        ("trainer.beta=${model}", ...),
        ("trainer.beta=???", ...),
    ],
)
def test_words_of_omegaconf(script: Path, words: str, expected: Any) -> None:
    text = LOAD.format("OmegaConf.merge(OmegaConf.load('conf/train.yaml'), OmegaConf.from_cli())")
    found = told(script, "cfg.trainer.beta", words, text)
    assert (found.value if found.kind is Kind.LITERAL else ...) == expected
    assert told(script, "cfg.trainer.beta", None, text).kind is Kind.UNKNOWN
