"""A reference is loaded with the dtype and the attention of a policy that is a model, and as TRL does otherwise."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import StopConstruction, begin_trainer, single_process, tiny_causal_lm

TARGETS = {
    target.attribute.partition("Trainer")[0]: target
    for target in gates.targets_here(next(patch for patch in loading.load() if patch.id == "ref-model-dtype-mismatch"))
}
DTYPE = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
POLICIES = (
    (torch.bfloat16, "flash_attention_2"),
    (torch.float16, {"text": "sdpa", "vision": "eager"}),
    (torch.float32, "eager"),
)


def policy_of(dtype: Any = torch.bfloat16, attention: Any = "flash_attention_2") -> Any:
    text = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False)
    config: Any = SimpleNamespace(get_text_config=lambda: text, _name_or_path="a policy", model_type="")
    if attention is not None:
        config._attn_implementation = attention
    model = tiny_causal_lm(config)
    model.dtype, model.warnings_issued = dtype, {}
    model.generation_config = SimpleNamespace(eos_token_id=None)
    return model


class Method:
    """A trainer's class that loads references, in which the loaders take notes."""

    def __init__(self, name: str) -> None:
        self.target = TARGETS[name]
        self.module: Any = importlib.import_module(self.target.module)
        self.trainer_class = getattr(self.module, f"{name}Trainer")
        self.loads: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.models = models = SimpleNamespace(from_pretrained=self.load)
        config = SimpleNamespace(architectures=["Policy"])
        self.shadows = {
            "create_model_from_path": self.load,
            "AutoModelForCausalLM": models,
            "AutoConfig": SimpleNamespace(from_pretrained=lambda *args, **options: config),
            "transformers": SimpleNamespace(
                Policy=models, __version__=transformers.__version__, TrainerCallback=transformers.TrainerCallback
            ),
        }
        self.within: dict[str, Any] = {}
        """What the module has while the trainer is made."""

    def load(self, *args: Any, **options: Any) -> None:
        self.loads.append((args, options))
        raise StopConstruction

    def begin(self, model: Any, *, stop: bool = False, **settings: Any) -> None:
        """Begin a trainer, up to the first model that it loads, or ``stop`` within the constructor of transformers."""

        def parent(trainer: Any) -> None:
            self.within = vars(self.module).copy()
            if stop:
                raise StopConstruction

        with single_process(self.module):
            begin_trainer(
                self.module,
                self.trainer_class,
                model,
                parent=parent,
                shadows=self.shadows,
                gradient_checkpointing=False,
                **settings,
            )

    def options(self, model: Any, **settings: Any) -> dict[str, Any]:
        """Return the keyword arguments with which the trainer of this model loads the first one."""
        self.loads.clear()
        self.begin(model, **settings)
        ((_, options),) = self.loads
        return options

    def loaders(self) -> dict[str, Any]:
        return {name: getattr(self.module, name, None) for name in self.shadows}

    def has_its_own_loaders(self) -> bool:
        """Return whether the module had its own loaders while the last trainer was made."""
        names = self.shadows.keys() & self.within.keys()
        return all(self.within[name] is self.shadows[name] for name in names)


@pytest.fixture(params=TARGETS)
def method(request: pytest.FixtureRequest) -> Method:
    return Method(request.param)


@pytest.mark.parametrize(("dtype", "attention"), POLICIES, ids=str)
def test_the_reference_is_loaded_like_the_policy(method: Method, dtype: Any, attention: Any) -> None:
    options = method.options(policy_of(dtype, attention))
    assert {name: options.get(name) for name in (DTYPE, "attn_implementation")} == {
        DTYPE: dtype,
        "attn_implementation": attention,
    }
    assert len({"dtype", "torch_dtype"} & set(options)) == 1


def test_trl_loads_it_with_neither(method: Method, switch: Any) -> None:
    with switch.off():
        options = method.options(policy_of())
    assert not {"dtype", "torch_dtype", "attn_implementation"} & set(options)


def test_it_is_the_model_that_trl_loads(method: Method, switch: Any) -> None:
    options = method.options(policy_of())
    ((patched, _),) = method.loads
    with switch.off():
        others = method.options(policy_of())
    ((unpatched, _),) = method.loads
    assert patched == unpatched
    assert {name: options[name] for name in others} == others


def test_a_policy_without_an_attention_gives_none(method: Method) -> None:
    options = method.options(policy_of(attention=None))
    assert options[DTYPE] is torch.bfloat16
    assert options["attn_implementation"] is None


@pytest.mark.parametrize(
    "own",
    [
        {"dtype": torch.float64, "attn_implementation": "eager"},
        {"torch_dtype": torch.float64, "attn_implementation": "eager"},
        {"dtype": "auto"},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_what_model_init_kwargs_set_is_left(method: Method, own: dict[str, Any]) -> None:
    try:
        options = method.options(policy_of(), model_init_kwargs=dict(own))
    except ValueError:
        pytest.skip("this release allows them for a policy that is given by name only")
    assert {name: options.get(name) for name in own} == own
    assert len({"dtype", "torch_dtype"} & set(options)) == 1
    assert options["attn_implementation"] == own.get("attn_implementation", "flash_attention_2")


@pytest.mark.parametrize(("version", "name"), [("4.55.4", "torch_dtype"), ("4.56.0", "dtype"), ("4.57.1", "dtype")])
def test_the_dtype_has_the_name_that_transformers_knows(
    method: Method, version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By its name: to import TRL may put another object in the place of the module.
    monkeypatch.setattr("transformers.__version__", version)
    options = method.options(policy_of())
    assert {"dtype", "torch_dtype"} & set(options) == {name}


def test_a_policy_that_is_given_by_name_is_loaded_as_trl_does(method: Method, switch: Any) -> None:
    patched = method.options("a policy")
    assert "attn_implementation" not in patched
    with switch.off():
        assert method.options("a policy") == patched


def test_a_policy_without_weights_is_left_alone(method: Method, switch: Any) -> None:
    def without_weights() -> Any:
        class WithoutWeights(type(policy_of())):  # type: ignore[misc]
            """As transformers 5 has them."""

            @property
            def dtype(self) -> Any:
                return next(iter(()))

        model = policy_of()
        del model.dtype
        model.__class__ = WithoutWeights
        return model

    patched = method.options(without_weights())
    with switch.off():
        assert method.options(without_weights()) == patched


def test_a_reference_of_the_users_leaves_the_loaders_alone(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ref_model" not in inspect.signature(method.trainer_class.__init__).parameters:
        pytest.skip("this trainer takes no reference")
    make = method.trainer_class.__init__

    def with_reference(trainer: Any, **arguments: Any) -> None:
        make(trainer, ref_model=policy_of(), **arguments)

    monkeypatch.setattr(method.trainer_class, "__init__", with_reference)
    method.begin(policy_of(), stop=True)
    assert method.has_its_own_loaders()


@pytest.mark.parametrize("by_name", [True, False])
def test_only_a_policy_that_is_a_model_has_other_loaders(method: Method, by_name: bool, switch: Any) -> None:
    if by_name:
        method.load = lambda *args, **options: policy_of()  # type: ignore[method-assign]
        method.shadows["create_model_from_path"] = method.load
        method.models.from_pretrained = method.load
    method.begin("a policy" if by_name else policy_of(), stop=True)
    assert method.has_its_own_loaders() is by_name
    with switch.off():
        method.begin("a policy" if by_name else policy_of(), stop=True)
    assert method.has_its_own_loaders()


def test_the_rest_of_transformers_is_there_while_the_trainer_is_made(method: Method) -> None:
    method.begin(policy_of())
    seen = method.within.get("transformers", transformers)
    assert seen.__version__ == transformers.__version__
    assert seen.TrainerCallback is transformers.TrainerCallback


def test_the_module_keeps_its_loaders(method: Method) -> None:
    before = method.loaders()
    method.begin(policy_of())
    assert all(value is before[name] for name, value in method.loaders().items())


def test_every_trainer_is_loaded_like_its_own_policy(method: Method) -> None:
    for dtype, attention in POLICIES[::-1]:
        options = method.options(policy_of(dtype, attention))
        assert (options[DTYPE], options["attn_implementation"]) == (dtype, attention)
