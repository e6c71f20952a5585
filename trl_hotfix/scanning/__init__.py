"""Scanning finds out which known bugs a training script, or a config of TRL's command line, hits.

It reads the file, and never runs or imports it. Where its text does not settle an argument, the answer is "cannot
tell".

- ``scripts`` reads a file, and raises an error if it cannot be scanned; ``notebooks`` reads
  a notebook, and ``files`` any file of a user.
- ``scopes`` has the scopes of a script, and the value that a name has at a line.
- ``bindings`` walks a script once, and collects its bindings and its calls.
- ``names`` follows a name to an expression, a dotted name or a class, ``origins`` an object to the call that makes it.
- ``uses`` says what a script does with an object, ``harmless`` what leaves it as it was, and ``elsewhere`` what sets an
  argument besides the call and the config.
- ``values`` evaluates an expression as far as the text of the script allows.
- ``config_arguments`` has the arguments of a config such as ``DPOConfig(...)``.
- ``budget`` bounds the steps that all this takes, and the size of values.
- ``indirect`` follows what is called, as through ``partial`` or a dict of trainers; ``beside`` reads imported files.
- ``readers`` finds what reads the command line, and which words nothing reads; ``told_parts`` has the values of
  ``args.beta``. ``parser_texts``, ``option_texts`` and ``argparse_words`` make the parser of a script again,
  ``click_words`` and ``click_groups`` its command of click, and ``fire_words`` what Fire starts. ``command_lines`` and
  ``own_classes`` are for the parsers of transformers and TRL, ``typer_words``, ``typer_options`` and
  ``typer_annotations`` for typer, ``told_commands`` for the parameters of a command. ``argv`` sees whether something
  else reads the words.
- ``hydra_mains``, ``told_settings``, ``settings_uses``, ``settings_files``, ``overrides``: Hydra and OmegaConf.
- ``trainer_calls`` finds the calls of TRL's trainers, and has their arguments.
- ``unseen``, ``hidden``, ``started`` and ``imports`` find trainers that are made out of sight. ``found`` has the types.
- ``rewards`` reads reward functions: is there a reward for each completion?
- ``imported_files`` has what the files of a project set on TRL's classes when a script imports them, and
  ``model_config`` what TRL makes of its ``ModelConfig``.
- ``yaml_configs`` reads a config of TRL's command line as the call of one trainer.
- ``model_files`` and ``facts`` read a model's folder and a config of accelerate, which have what no script says.
- ``told_files``, ``yaml_files`` and ``json_files`` read what a stranger wrote, and bound its size.
- ``script_datasets`` has the columns and the roles of a dataset that a script makes.
- ``dataset_files`` and ``dataset_rows`` read a training dataset, as JSON Lines, JSON, CSV or Parquet.
- ``old_runs``, ``recorded_hits`` and ``inert_pickles`` read what a run has left behind.
- ``pins`` reads the versions that a project is pinned to.
- ``ignores`` and ``ignore_table`` read the findings that a project accepts.
- ``default_changes`` has the defaults of a config change between two releases.
- ``hits`` compares the arguments of a trainer with the conditions of each known bug.
"""
