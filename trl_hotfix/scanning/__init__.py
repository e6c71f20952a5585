"""Scanning tells which known bugs a training script, or a config of TRL's command line, hits.

The file is read, and never run or imported. Where its text does not tell an argument, the answer is "cannot tell".

- ``scripts`` reads a file, and raises an error if it cannot be scanned.
- ``scopes`` has the scopes of a script, and the value that a name has at a line.
- ``bindings`` walks a script once, and collects its bindings and its calls.
- ``names`` follows a name to an expression, a dotted name or a class.
- ``values`` evaluates an expression as far as the text of the script allows.
- ``config_arguments`` has the arguments of a config such as ``DPOConfig(...)``.
- ``trainer_calls`` finds the calls of TRL's trainers, and has their arguments.
- ``yaml_configs`` reads a config of TRL's command line as the call of one trainer.
- ``model_files`` and ``facts`` read a model's folder and a config of accelerate, which tell what no script says.
- ``old_runs``, ``recorded_hits`` and ``inert_pickles`` read what a run has left behind.
- ``default_changes`` tells which defaults of a config change between two releases.
- ``hits`` compares the arguments of a trainer with the conditions of each known bug.
"""
