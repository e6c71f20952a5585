"""Code compiled by ``torch.compile`` gives the eager result, or raises an error, for every kind of target."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trl import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.authoring import act
from trl_hotfix.model import Outcome, Reason, State, Target, Verdict
from trl_hotfix.patching.compiled_code import compiled_now
from trl_hotfix.patching.sites import Sites
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor

from helpers.layered import Counted, layer_of


@pytest.fixture(scope="session")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of inductor, so that no kernel is built twice."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, inductor: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SOURCE = """
import torch

def function(x):
    return x * 2

def caller(x):
    return function(x)

class Base:
    def inherited(self, x):
        return x * 2

class Trainer(Base):
    def method(self, x):
        return x * 2

    @staticmethod
    def static(x):
        return x * 2

    @classmethod
    def klass(cls, x):
        return x * 2

class Model(torch.nn.Module):
    def helper(self, x):
        return x * 2

    def forward(self, x):
        return self.helper(x)
"""
NUMBERS = iter(range(1000))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A module with a name of its own: Dynamo caches modules by name."""
    made_up = ModuleType(f"trl.compiled_{next(NUMBERS)}")
    (tmp_path / "source.py").write_text(SOURCE)
    exec(compile(SOURCE, str(tmp_path / "source.py"), "exec"), vars(made_up))
    monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    return made_up


def add(number: int) -> Any:
    def adding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) + number

    return adding


def put_on(module: ModuleType, attribute: str, layers: int, traced: bool) -> Any:
    site = Sites().at(module, Target(module.__name__, attribute, "wrapper", traced=traced))
    for number in range(layers):
        site.put_on(Layer(f"patch-{number}", 1, add(100 * 10**number), traced))
    return vars(site.owner)[site.name]


def calls(owner: Any, name: str) -> Callable[..., Any]:
    return lambda x: getattr(owner, name)(x)


# The callers, by what is patched.
KINDS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "Trainer.method": lambda module: calls(module.Trainer(), "method"),
    "Trainer.inherited": lambda module: calls(module.Trainer(), "inherited"),
    "Trainer.static": lambda module: calls(module.Trainer(), "static"),
    "Trainer.klass": lambda module: calls(module.Trainer(), "klass"),
    "function": lambda module: module.caller,
    "Model.helper": lambda module: module.Model(),
}


def step_of(module: ModuleType, attribute: str) -> Callable[[Any], Any]:
    inner = KINDS[attribute](module)

    def step(x: Any) -> Any:
        return inner(x) + 1

    return step


def value(step: Callable[[Any], Any]) -> float:
    elements: list[float] = step(torch.ones(2)).tolist()
    assert elements[0] == elements[1]
    return elements[0]


BACKENDS = [
    "eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
    ),
]


def every_kind(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrise a test by kind of target, traced or not, number of layers and compiler backend."""
    by: dict[str, Any] = {"attribute": KINDS, "traced": [False, True], "layers": [1, 2], "backend": BACKENDS}
    for name, values in by.items():
        ids = ["untraced", "traced"] if name == "traced" else None
        test = pytest.mark.parametrize(name, values, ids=ids)(test)
    return test


@every_kind
def test_compiled_code_gives_the_patched_eager_result(
    module: ModuleType, attribute: str, traced: bool, layers: int, backend: str
) -> None:
    step = step_of(module, attribute)
    unpatched = value(torch.compile(step, backend=backend))
    assert unpatched == value(step) == 3.0
    torch._dynamo.reset()
    installed = put_on(module, attribute, layers, traced)
    function = getattr(installed, "__func__", installed)
    assert type(function) is FunctionType
    assert hasattr(function, "_torchdynamo_disable") != traced
    eager = value(step)
    assert eager == 3.0 + (100.0 if layers == 1 else 1100.0)
    assert value(torch.compile(step, backend=backend)) == eager


@every_kind
def test_fullgraph_gives_the_eager_result_or_an_error(
    module: ModuleType, attribute: str, traced: bool, layers: int, backend: str
) -> None:
    put_on(module, attribute, layers, traced)
    step = step_of(module, attribute)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    if traced:
        assert value(compiled) == value(step) == 3.0 + (100.0 if layers == 1 else 1100.0)
    else:
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            compiled(torch.ones(2))


def stub_dpo_trainer() -> Any:
    """Return a DPOTrainer with the attributes that ``dpo_loss`` reads."""
    trainer = object.__new__(DPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
    trainer.beta, trainer.label_smoothing, trainer.loss_type, trainer.f_divergence_type = (
        0.1,
        0.0,
        "sigmoid",
        "reverse_kl",
    )
    trainer.reference_free = False
    return trainer


LOGPS = tuple(torch.tensor([log_prob]) for log_prob in (-1.0, -2.0, -1.5, -1.8))


def loss_of(trainer: Any, *logps: Any) -> Any:
    return trainer.dpo_loss(*(logps or LOGPS))[0].sum()


def adds_100(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    losses, *metrics = wrapped(*args, **kwargs)
    return losses + 100, *metrics


def loss_is_raised(module: ModuleType) -> Outcome:
    loss = float(loss_of(stub_dpo_trainer()))
    return Outcome(Verdict.FIXED if loss > 100 else Verdict.REPRODUCED, {"loss": loss})


def state_of(report: Any) -> tuple[State, Reason]:
    return report["made-up"].state, report["made-up"].reason


LATE = (State.UNREACHED, Reason.COMPILED)
ON = (State.APPLIED, Reason.PROVEN)


def warnings_at_train_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    caplog.clear()
    args = DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    handler = CallbackHandler([trl_hotfix.HotfixCallback()], None, None, None, None)
    handler.on_train_begin(args, TrainerState(), TrainerControl())
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == ("trl_hotfix", logging.WARNING)
    ]


# apply() after a compilation


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("traced", [False, True], ids=["untraced", "traced"])
def test_code_compiled_before_apply_is_unreached_until_reset(
    declare: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, traced: bool, backend: str
) -> None:
    trainer = stub_dpo_trainer()
    compiled = torch.compile(lambda *logps: loss_of(trainer, *logps), backend=backend)
    unpatched = float(compiled(*LOGPS))
    assert unpatched < 1
    declare(loss_is_raised, adds_100, traced=traced)

    assert state_of(trl_hotfix.apply()) == LATE
    # Eager code runs the wrapper, and compiled code does not: that is what the report warns of.
    assert float(loss_of(trainer)) > 100
    assert float(compiled(*LOGPS)) == pytest.approx(unpatched)
    assert state_of(trl_hotfix.status()) == LATE
    assert __file__ in trl_hotfix.status()["made-up"].evidence["trl.trainer.dpo_trainer"]["by"]
    (warning,) = warnings_at_train_begin(tmp_path, caplog)
    assert warning.startswith("made-up: unreached (compiled): compiled before the patch went on: ")
    assert __file__ in warning
    with pytest.raises(trl_hotfix.NotAppliedError, match="compiled"):
        trl_hotfix.apply(strict="all")

    torch._dynamo.reset()
    assert state_of(trl_hotfix.status()) == ON
    assert warnings_at_train_begin(tmp_path, caplog) == []
    assert float(compiled(*LOGPS)) == pytest.approx(float(loss_of(trainer))) == pytest.approx(unpatched + 100)
    # The code was compiled again with the wrapper in it: no warning is due.
    assert state_of(trl_hotfix.status()) == ON


def test_a_compiled_model_concerns_only_code_inside_it(declare: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    torch.compile(model, backend="eager")(torch.tensor([[1, 2]]))
    assert torch._dynamo.convert_frame.output_codes.seen
    declare(loss_is_raised, adds_100)
    declare(loss_is_raised, adds_100, id="inside", traced=True)
    assert state_of(trl_hotfix.apply(only=["made-up"])) == ON
    trl_hotfix.revert()
    inside = trl_hotfix.apply(only=["inside"])["inside"]
    assert (inside.state, inside.reason) == LATE


def test_code_compiled_before_the_import_is_no_warning() -> None:
    code = (
        "import torch, trl_hotfix\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "assert torch._dynamo.convert_frame.output_codes.seen\n"
        "one = 'moe-aux-loss-lost-under-deepspeed'\n"
        "trl_hotfix.apply(only=[one])\n"
        "import trl.trainer.dpo_trainer\n"
        "print(trl_hotfix.status()[one].state.value)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert process.stdout.split()[-1:] == ["applied"], process.stderr


OURS = str(Path(trl_hotfix.__file__).parent)


def test_calls_of_compiled_code_are_counted_for_each_trainer(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Dynamo compiles neither the counting nor what it reads, of which it would have a version for each trainer."""

    class Trainer:
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def acts_on_four(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args[0].numel() == 4:
            act()
        return wrapped(*args, **kwargs)

    layers = tuple(layer_of(f"patch-{number}", acts_on_four) for number in range(2))
    for layer in layers:
        layer.armed = True
    path = (__name__, "Trainer.method")
    Trainer.method = wrapped_descriptor(Trainer.method, layers, Trainer, path)  # type: ignore[method-assign]
    trainers = [Trainer() for _ in range(12)]
    for _ in range(2):
        compiled = torch.compile(lambda trainer, x: trainer.method(x) + 1, backend="eager")
        for trainer in trainers:
            for size in (3, 4):
                assert compiled(trainer, torch.ones(size)).tolist() == [3.0] * size
        names = {code.co_filename for ref in compiled_now(traced=True) if (code := ref()) is not None}
        assert not [name for name in names if name.startswith(OURS)]
        torch._dynamo.reset()
    for layer in layers:
        counts = [Counted(layer.witnessed).known(trainer) for trainer in trainers]
        assert [(count.called, count.acted) for count in counts if count is not None] == [(4, 2)] * 12
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [warning for warning in recwarn if "_getframe" in str(warning.message)]
