"""The record of a run: the ``callback`` that writes it, and its comparison between ``ranks``.

``run`` says what each patch was to the run, ``run_hits`` which known bugs it hits, by the ``trainer_arguments``,
``observation`` how often the code of those that are observed was called, and ``problems`` what is wrong. ``trackers``
and ``model_cards`` write the record into trackers and model cards, ``files`` into files. ``trainers`` finds the trainer
of an event. ``failures`` keeps a run going if the record fails.
"""
