"""With a dictionary of evaluation datasets, TRL's own metrics of all of them have one name.

``Trainer.evaluate`` evaluates one dataset after the other, with ``eval_easy`` and ``eval_hard`` before its own metrics.
``log`` puts ``eval_`` before those of TRL, whichever dataset it was (1.16.0 grpo_trainer.py:3317, dpo_trainer.py:1705).
So ``eval_reward`` has the number of the last one, in a tracker and for ``metric_for_best_model``.

The name of the dataset is in ``eval_easy_runtime``. The lists of the evaluation get a second name with it, and TRL
averages and logs them itself. Some releases hand a copy of the logs on: what they log for the dataset is then also put
into the logs that ``evaluate`` returns, where ``metric_for_best_model`` is looked up. GOLD calls SFT's ``log`` while
it has its lists, so it is repaired there.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, stub_that_logs, trainer_class_of

_PREFIX, _TIME = "eval_", "_runtime"


@wrapper
def name_the_dataset(call: Call) -> Any:
    """Log the metrics of a named evaluation dataset under its name, too."""
    logs, trainer = call["logs"], call.trainer
    name = next(
        (key[len(_PREFIX) : -len(_TIME)] for key in logs if key.startswith(_PREFIX) and key.endswith(_TIME)), ""
    )
    if not name:
        return call()
    stored = getattr(trainer, "_stored_metrics", None)
    # A trainer that stores metrics has put the prefix before them already.
    prefix = "" if stored is None else _PREFIX
    metrics = (trainer._metrics if stored is None else stored).get("eval", {})
    for key in [each for each in metrics if each.startswith(prefix)]:
        metrics[f"{prefix}{name}_{key.removeprefix(prefix)}"] = list(metrics[key])
        call.act()
    result = call()
    logged = trainer.state.log_history[-1]
    logs.update({key: logged[key] for key in logged if key.startswith(f"{_PREFIX}{name}_")})
    return result


def each_dataset_has_its_metrics(module: ModuleType) -> Outcome:
    """Log two evaluations, and count the names of a metric: that of the last one, and that of each."""
    trainer_class = trainer_class_of(module)
    if reexported := absent_if_reexported(module, trainer_class.log):
        return reexported
    code = inspect.unwrap(trainer_class.log).__code__
    if "mode" not in code.co_varnames and ("_metrics" in code.co_names or hasattr(module, "KTOTrainer")):
        return absent("training and evaluation have the same lists, or log adds sums up under names of its own")
    if "should_evaluate" in code.co_names:
        return absent("transformers says after the first dataset that the evaluation is over: the others are training")
    trainer, logged = stub_that_logs(module)
    stores = "_stored_metrics" in vars(trainer)
    for number, name in enumerate(("easy", "hard")):
        lists = trainer._stored_metrics["eval"] if stores else trainer._metrics["eval"]
        lists["eval_margin" if stores else "margin"].append(float(number))
        trainer.log({f"eval_{name}_loss": 0.0, f"eval_{name}_runtime": 1.0})
    return judge(sum(name.endswith("margin") for name in logged), right=3, wrong=1)
