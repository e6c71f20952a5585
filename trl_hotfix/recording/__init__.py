"""The record of a run: the ``callback`` writes it, and ``ranks`` compare theirs.

``agreement`` lets all ranks hear the same problems, and end together or not at all. ``run`` says what each patch was to
the run, ``run_hits`` which known bugs it hits, by the ``trainer_arguments``, ``sums`` counts them, ``run_log`` says it
in the log, and ``observation`` how often the code of those that are observed was called, and ``problems`` what is
wrong. ``trackers`` and ``model_cards`` write the record into trackers and model cards, ``files`` into files.
``effect`` measures what each repair changed in the first step, and ``rewinding`` takes the extra steps back.
``every_rank`` puts what other ranks say into that of the first. ``trainers`` finds the trainer of an event,
``beginnings`` keeps where its training began. ``trainer_facts`` are the facts that decide a hit, of the weights
(``weight_facts``), the launch (``launch_facts``) and the dataset (``dataset_facts``); ``models_within`` looks into what
wraps a model. ``failures`` keeps a run going if the record fails.
"""
