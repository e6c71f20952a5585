"""``check`` asks a user's own script whether its run trains right.

``process`` starts ``inside``, which runs the script up to the trainer that it makes: ``stem`` waits there, and
``forks`` forks the process once for each run. A fork, ``one_run``, goes on through the script to its own ``train()``,
trains a few steps with what a ``variant`` changes, and ends.

What a run is made of: ``argument_classes`` makes each config again, with ``safe_arguments`` and in the batches of
``shapes``. ``loading`` gives small models and tokenizers, by ``small_folders``, ``families`` and ``small_tokenizers``;
``loaded_rows`` and ``rows`` cut datasets. ``collating`` widens batches, ``ordering`` settles the order of rows,
``generation`` answers from a table, ``rewards`` asks rewards twice. ``environment`` keeps a script from GPUs, the hub
and the disk. ``recorder`` notes gradients, weights and logs, and ``tracing`` what each module computes.

``questions`` are the relations and when one cannot be asked, ``judging`` compares the runs (``comparing``), ``blame``
asks whose a difference is, ``owners`` knows what is the user's, ``places`` where two runs part. ``hits`` are the bugs
of the catalogue that a run hits, and ``bugs`` settles them by a repaired run. ``answers`` is the shape of the answer,
and ``not_checked`` what it leaves out.

torch, transformers and TRL are imported in that process only.
"""
