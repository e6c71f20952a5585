"""The catalogue: ``patches.yaml`` and what is on record of its patches, read and checked.

``loading`` gives the patches, ``parsing``, ``yaml_nodes`` and ``checks`` make them, with every mistake at once;
``conditions`` is the language of ``hits``; ``modules`` finds the code of a patch; ``packs`` are the patches of third
parties; ``evidence`` is what the bench has seen, and ``data_files`` where all of it lies.
"""
