"""Run inside one release: what runs of real trainers leave on record.

    python records.py OUT.json [TRACKER...]

TRL is imported once, and every case runs in a fork of that process. It is found out first what a run without trackers
imports, and then what each of these trackers has in its own files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# As the line in trl_hotfix_autoapply.pth does, which is not run from a folder on PYTHONPATH.
os.environ["TRL_HOTFIX"] = "1"
os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": "trackio", "GIT_PYTHON_REFRESH": "quiet"}

from trl_hotfix import HotfixCallback, autostart

import release
from trainers import TRAINERS, Said, dpo, ppo, there

autostart.start()

MODULES = {
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "tensorboard": "torch.utils.tensorboard",
}
KEY, FILE = "trl_hotfix", "trl_hotfix.json"
SECTION = "### TRL repaired at run time"


def of(trainer: Any, said: Said) -> dict[str, Any]:
    """What a run has left everywhere but in trackers."""
    out = Path(trainer.args.output_dir)
    files = {str(each.relative_to(out)): json.loads(each.read_text()) for each in out.rglob(FILE)}
    card = out / "README.md"
    return {
        "history": [each[KEY] for each in trainer.state.log_history if KEY in each],
        "files": files,
        "checkpoints": sorted(each.name for each in out.glob("checkpoint-*")),
        "said": list(said.lines),
        "sections": card.read_text().count(SECTION) if card.is_file() else None,
        "callbacks": sum(isinstance(each, HotfixCallback) for each in trainer.callback_handler.callbacks),
    }


def trained(make: Callable[..., Any]) -> dict[str, Any]:
    """One step, with a checkpoint, and the model card written twice."""
    said = Said()
    trainer = make(save_strategy="steps", save_steps=1, output_dir="out")
    trainer.train()
    for _ in range(2):
        trainer.create_model_card()
    return of(trainer, said)


def several_times() -> dict[str, Any]:
    """An evaluation, two trainings and another evaluation of one trainer, and the training of a second one."""
    found = []
    for _ in range(2):
        said = Said()
        trainer = dpo()
        if not found:
            trainer.evaluate()
            found.append(of(trainer, said))
            trainer.train()
            found.append(of(trainer, said))
        trainer.train()
        trainer.evaluate()
        found.append(of(trainer, said))
    return {"found": found}


def of_others() -> dict[str, Any]:
    """A trainer of transformers itself."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    import tiny

    said = Said()
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    args = tiny.config(TrainingArguments, save_strategy="steps", save_steps=1, output_dir="out")
    trainer = Trainer(model=tiny.llama("models", seed=0), args=args, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.evaluate(Dataset.from_list(rows))
    trainer.create_model_card()
    return of(trainer, said)


def strict_by_hand() -> dict[str, Any]:
    """The callback given by hand is strict, and the one from ``TRL_HOTFIX=1``, which comes first, is not."""
    from trl_hotfix import NotAppliedError
    from trl_hotfix.recording import ranks

    said = Said()
    ranks.compare = lambda mine: ["rank 1: something else is on there"]
    trainer = dpo(output_dir="out")
    trainer.add_callback(HotfixCallback(strict=True))
    try:
        trainer.train()
    except NotAppliedError as error:
        return {**of(trainer, said), "error": str(error), "step": trainer.state.global_step}
    return {**of(trainer, said), "error": None}


def without_trackers() -> dict[str, Any]:
    """What of the trackers a run imports and leaves that reports to none of them."""
    said = Said()
    before = loaded()
    trainer = dpo(output_dir="out")
    trainer.train()
    return {
        **of(trainer, said),
        "imported": sorted(loaded() - before),
        "left": sorted(each.name for each in Path().iterdir()),
    }


def loaded() -> set[str]:
    return {each for each in sys.modules if each.startswith(("wandb", "trackio", "mlflow", "tensorboard"))}


def tracked(*trackers: str, make: Callable[..., Any] = dpo, how: str = "env", times: int = 1) -> dict[str, Any]:
    """What the trackers' files have of a run, with the callback from ``TRL_HOTFIX=1``, by hand, or without a run."""
    import transformers

    os.environ |= {"WANDB_DIR": str(Path.cwd()), "MLFLOW_TRACKING_URI": Path("mlruns").resolve().as_uri()}
    if how != "env":
        transformers.trainer.DEFAULT_CALLBACKS.remove(HotfixCallback)
    said = Said()
    trainer = make(report_to=list(trackers), output_dir="out", run_name="run", save_strategy="steps", save_steps=1)
    if how == "hand":
        trainer.add_callback(HotfixCallback())
    if how == "evaluate":
        trainer.add_callback(HotfixCallback)
        trainer.evaluate()
    if how == "broken":
        trainer.add_callback(HotfixCallback)
        for each in trackers:
            break_it(each)
    for _ in range(times if how != "evaluate" else 0):
        trainer.train()
    return {**of(trainer, said), "trackers": {each: READERS[each]() for each in trackers}}


def break_it(tracker: str) -> None:
    """Have the tracker's callback without a run of a kind that ours knows: the next thing to do with it fails."""
    from trl_hotfix.recording import callback

    def fail(*_: Any) -> bool:
        raise OSError(f"{tracker} does not answer")

    name = next(each for each in callback._TRACKERS if each.lower().startswith(tracker))
    callback._TRACKERS[name] = fail


def in_wandb() -> list[Any]:
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.finish()
    # Only now has its other process written everything.
    wandb.teardown()
    found = []
    for file in sorted(Path().glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        config: dict[str, Any] = {}
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for source in (record.run.config, record.config):
                config |= {each.key: json.loads(each.value_json) for each in source.update if each.key}
        found.append(config.get(KEY))
    return found


def in_trackio() -> list[Any]:
    import trackio

    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()
    found = []
    for file in Path("trackio").glob("*.db"):
        with contextlib.closing(sqlite3.connect(file)) as database:
            found += [json.loads(each).get(KEY) for (each,) in database.execute("SELECT config FROM configs")]
    return found


def in_mlflow() -> list[Any]:
    import mlflow

    while mlflow.active_run() is not None:
        mlflow.end_run()
    client = mlflow.MlflowClient()
    found = []
    for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
        digest = run.data.tags.get(KEY)
        file = Path(run.info.artifact_uri.removeprefix("file://"), FILE)
        record = json.loads(file.read_text()) if file.is_file() else {"digest": None}
        found.append(record if record["digest"] == digest else [record, digest])
    return found


def in_tensorboard() -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[Any] = []
    # Each folder is a run; what is not in the folder that the scalars are in is not in the run.
    for folder in sorted({each.parent for each in Path().rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()
        texts = events.Tensors(f"{KEY}/text_summary") if f"{KEY}/text_summary" in tags["tensors"] else []
        of_folder = [each.tensor_proto.string_val[0].decode().removeprefix("```json\n") for each in texts]
        found += [json.loads(each.removesuffix("```")) for each in of_folder] if tags["scalars"] else ["no run"]
    return found


READERS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow, "tensorboard": in_tensorboard}


def main(out: str, *trackers: str) -> None:
    cases: dict[str, Callable[[], Any]] = {"others": of_others, "several times": several_times}
    cases["strict by hand"] = strict_by_hand
    # What each fork would import for itself.
    for name, make in TRAINERS.items():
        if there(name):
            cases[name] = functools.partial(trained, make)
    if trackers:
        cases["without trackers"] = without_trackers
        for how in ("env", "hand"):
            cases[f"tracked, {how}"] = functools.partial(tracked, *trackers, how=how)
        cases["tracked twice"] = functools.partial(tracked, *trackers, times=2)
        cases["tracked evaluation"] = functools.partial(tracked, *trackers, how="evaluate")
        cases["trackers that fail"] = functools.partial(tracked, *trackers, how="broken")
        if there("PPO"):
            cases["tracked PPO"] = functools.partial(tracked, *trackers, make=ppo)
            cases["tracked PPO, hand"] = functools.partial(tracked, *trackers, make=ppo, how="hand")
    answer = {}
    for name, case in cases.items():
        if name.startswith("track"):
            for each in trackers:
                import_module(MODULES[each])
        answer[name] = release.alone(case, 120)
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
