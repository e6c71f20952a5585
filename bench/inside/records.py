"""Run inside one release: collect the records that runs of real trainers leave.

    python -m bench.inside.records OUT.json [TRACKER,TRACKER...] CASE...

TRL is imported once, and every case runs in a fork of that process. The cases are those of ``main``, among them each
trainer, what a run without trackers imports, and what each of these trackers has in its own files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# Do what the line in trl_hotfix_autoapply.pth does, which Python does not run from a folder on PYTHONPATH.
os.environ["TRL_HOTFIX"] = "1"
os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": "trackio", "GIT_PYTHON_REFRESH": "quiet"}

from trl_hotfix import HotfixCallback, autostart

from bench.inside.trainers import TRAINERS, MessageRecorder, dpo, is_available, ppo
from bench.proving import release

autostart.start()

MODULES = {
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "tensorboard": "torch.utils.tensorboard",
}
KEY, FILE = "trl_hotfix", "trl_hotfix.json"
SECTION = "### TRL repaired at run time"


def record_of(trainer: Any, recorder: MessageRecorder) -> dict[str, Any]:
    """Return the records of a run everywhere but in trackers."""
    out = Path(trainer.args.output_dir)
    files = {str(file.relative_to(out)): json.loads(file.read_text()) for file in out.rglob(FILE)}
    card = out / "README.md"
    return {
        "history": [entry[KEY] for entry in trainer.state.log_history if KEY in entry],
        "files": files,
        "checkpoints": sorted(folder.name for folder in out.glob("checkpoint-*")),
        "said": list(recorder.lines),
        "sections": card.read_text().count(SECTION) if card.is_file() else None,
        "callbacks": sum(isinstance(callback, HotfixCallback) for callback in trainer.callback_handler.callbacks),
    }


def trained(make: Callable[..., Any]) -> dict[str, Any]:
    """Train one step with a checkpoint, and write the model card twice."""
    recorder = MessageRecorder()
    trainer = make(save_strategy="steps", save_steps=1, output_dir="out")
    trainer.train()
    for _ in range(2):
        trainer.create_model_card()
    return record_of(trainer, recorder)


def several_times() -> dict[str, Any]:
    """Evaluate, train twice and evaluate again with one trainer; then train and evaluate with a second one."""
    records = []
    for _ in range(2):
        recorder = MessageRecorder()
        trainer = dpo()
        if not records:
            trainer.evaluate()
            records.append(record_of(trainer, recorder))
            trainer.train()
            records.append(record_of(trainer, recorder))
        trainer.train()
        trainer.evaluate()
        records.append(record_of(trainer, recorder))
    return {"found": records}


def of_others() -> dict[str, Any]:
    """Train with the ``Trainer`` of transformers itself."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    import tiny

    recorder = MessageRecorder()
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    args = tiny.config(TrainingArguments, save_strategy="steps", save_steps=1, output_dir="out")
    trainer = Trainer(model=tiny.llama("models", seed=0), args=args, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.evaluate(Dataset.from_list(rows))
    trainer.create_model_card()
    return record_of(trainer, recorder)


def strict_by_hand() -> dict[str, Any]:
    """Train with two callbacks: one from ``TRL_HOTFIX=1``, which comes first, and a strict one added by hand."""
    from trl_hotfix import NotAppliedError
    from trl_hotfix.recording import callback
    from trl_hotfix.recording.agreement import Agreed, Problem

    recorder = MessageRecorder()
    other = Problem("something else is on there", ranks=(1,))
    callback.agree = lambda says, moment: Agreed(says.level, (other,))  # type: ignore[assignment]
    trainer = dpo(output_dir="out")
    trainer.add_callback(HotfixCallback(strict=True))
    try:
        trainer.train()
    except NotAppliedError as error:
        return {**record_of(trainer, recorder), "error": str(error), "step": trainer.state.global_step}
    return {**record_of(trainer, recorder), "error": None}


def without_trackers() -> dict[str, Any]:
    """Return what a run that reports to no tracker imports of the trackers, and the files that it leaves."""
    recorder = MessageRecorder()
    before = loaded()
    trainer = dpo(output_dir="out")
    trainer.train()
    return {
        **record_of(trainer, recorder),
        "imported": sorted(loaded() - before),
        "left": sorted(path.name for path in Path().iterdir()),
    }


def loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith(("wandb", "trackio", "mlflow", "tensorboard"))}


def tracked(*trackers: str, make: Callable[..., Any] = dpo, mode: str = "env", times: int = 1) -> dict[str, Any]:
    """Return the records in the trackers' files, with the callback of ``TRL_HOTFIX=1`` or another ``mode``."""
    import transformers

    os.environ |= {"WANDB_DIR": str(Path.cwd()), "MLFLOW_TRACKING_URI": Path("mlruns").resolve().as_uri()}
    if mode != "env":
        transformers.trainer.DEFAULT_CALLBACKS.remove(HotfixCallback)
    recorder = MessageRecorder()
    trainer = make(report_to=list(trackers), output_dir="out", run_name="run", save_strategy="steps", save_steps=1)
    if mode == "hand":
        trainer.add_callback(HotfixCallback())
    if mode == "evaluate":
        trainer.add_callback(HotfixCallback)
        trainer.evaluate()
    if mode == "broken":
        trainer.add_callback(HotfixCallback)
        for tracker in trackers:
            break_tracker(tracker)
    for _ in range(times if mode != "evaluate" else 0):
        trainer.train()
    return {**record_of(trainer, recorder), "trackers": {tracker: READERS[tracker]() for tracker in trackers}}


def break_tracker(tracker: str) -> None:
    """Make writing to this tracker fail."""
    from trl_hotfix.recording import trackers

    def fail(*_: Any) -> bool:
        raise OSError(f"{tracker} does not answer")

    name = next(name for name in trackers._TRACKERS if name.lower().startswith(tracker))
    trackers._TRACKERS[name] = fail


def in_wandb() -> list[Any]:
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.finish()
    # wandb's other process has written everything only after this.
    wandb.teardown()
    records = []
    for file in sorted(Path().glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        config: dict[str, Any] = {}
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for source in (record.run.config, record.config):
                config |= {item.key: json.loads(item.value_json) for item in source.update if item.key}
        records.append(config.get(KEY))
    return records


def in_trackio() -> list[Any]:
    import trackio

    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()
    records = []
    for file in Path("trackio").glob("*.db"):
        with contextlib.closing(sqlite3.connect(file)) as database:
            records += [json.loads(config).get(KEY) for (config,) in database.execute("SELECT config FROM configs")]
    return records


def in_mlflow() -> list[Any]:
    import mlflow

    while mlflow.active_run() is not None:
        mlflow.end_run()
    client = mlflow.MlflowClient()
    records = []
    for run in client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]):
        digest = run.data.tags.get(KEY)
        file = Path(run.info.artifact_uri.removeprefix("file://"), FILE)
        record = json.loads(file.read_text()) if file.is_file() else {"digest": None}
        records.append(record if record["digest"] == digest else [record, digest])
    return records


def in_tensorboard() -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records: list[Any] = []
    # Each folder is a run: a record outside the folder with the scalars is not part of the run.
    for folder in sorted({file.parent for file in Path().rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()
        texts = events.Tensors(f"{KEY}/text_summary") if f"{KEY}/text_summary" in tags["tensors"] else []
        of_folder = [text.tensor_proto.string_val[0].decode().removeprefix("```json\n") for text in texts]
        records += [json.loads(text.removesuffix("```")) for text in of_folder] if tags["scalars"] else ["no run"]
    return records


READERS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow, "tensorboard": in_tensorboard}


def main(out: str, of_runs: str, *names: str) -> None:
    trackers = of_runs.split(",")
    # Importing here saves each fork the import. DPO is in most cases.
    for name in TRAINERS.keys() & {"DPO", *names}:
        is_available(name)
    cases: dict[str, Callable[[], Any]] = {
        "others": of_others,
        "several times": several_times,
        "strict by hand": strict_by_hand,
        "trainers": lambda: [name for name in TRAINERS if is_available(name)],
        **{name: functools.partial(trained, make) for name, make in TRAINERS.items()},
        "without trackers": without_trackers,
        **{f"tracked, {mode}": functools.partial(tracked, *trackers, mode=mode) for mode in ("env", "hand")},
        "tracked twice": functools.partial(tracked, *trackers, times=2),
        "tracked evaluation": functools.partial(tracked, *trackers, mode="evaluate"),
        "trackers that fail": functools.partial(tracked, *trackers, mode="broken"),
        "tracked PPO": functools.partial(tracked, *trackers, make=ppo),
        "tracked PPO, hand": functools.partial(tracked, *trackers, make=ppo, mode="hand"),
    }
    answer = {}
    # Those with trackers come last, since the other runs are to import none.
    for name in sorted(names, key=lambda name: name.startswith("track")):
        if name.startswith("track"):
            for tracker in trackers:
                import_module(MODULES[tracker])
        answer[name] = release.alone(cases[name], 120)
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("trl_hotfix").setLevel(logging.DEBUG)
    main(*sys.argv[1:])
