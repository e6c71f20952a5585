"""The catalogue: ``patches.yaml`` and the evidence on record for its patches, read and checked.

``loading`` returns the patches. ``parsing``, ``yaml_nodes`` and ``checks`` build them and report every mistake at once.
``functions`` checks an entry against the module of its patch; ``shipped`` makes the JSON of a wheel, all checked.
``conditions`` is the language of ``hits``; ``modules`` finds the code of a patch; ``packs`` are the patches of third
parties, and ``names`` finds a patch by an id that it had before. ``on_record`` has the results of the proof bench,
which ``condensed`` makes of ``evidence/``; ``evidence_file`` is the format of a file there; ``facts`` names the facts
of a run that decide a hit, and ``data_files`` has the paths of all these files.
"""
