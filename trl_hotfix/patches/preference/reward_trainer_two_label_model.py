"""RewardTrainer loads a model that is given by its name with as many outputs as its config says, two by default.

TRL 0.26.0 loads it with ``create_model_from_path``, and lost ``num_labels=1`` with that. 0.29.0 sets it again (pull
requests 5066 and 5087). The wrapper adds it where TRL calls that function, since without ``args`` there is no
``model_init_kwargs`` to add it to. 0.29.0 also overrules a number of the user's; the wrapper leaves it.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, begin_trainer, single_process


@wrapper
def load_one_output(call: Call) -> Any:
    """Make the trainer with a loader that gives the model one output, unless the user says how many."""
    options = getattr(call["args"], "model_init_kwargs", None) or {}
    # A model that is loaded with a config cannot be given the number besides.
    if not isinstance(call["model"], str) or {"num_labels", "config"} & set(options):
        return call()
    module = module_of(call.__wrapped__)
    load = module.create_model_from_path

    def load_with_one_output(*args: Any, **options: Any) -> Any:
        return load(*args, num_labels=1, **options)

    with shadowed(module, "create_model_from_path", load_with_one_output):
        return call()


def model_has_one_output(module: ModuleType) -> Outcome:
    """Ask with how many outputs the real constructor loads a model by its name: two if it says none."""
    if not hasattr(module, "AutoModelForSequenceClassification"):
        return absent("in this release the trainer loads no model")
    loads: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> Any:
        loads.append(options)
        raise StopConstruction

    loader = SimpleNamespace(from_pretrained=load)
    with single_process(module):
        begin_trainer(module, module.RewardTrainer, "a model", shadows={"AutoModelForSequenceClassification": loader})
    return judge(loads[0].get("num_labels", 2), right=1, wrong=2)
