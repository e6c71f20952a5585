"""The results: ``evidence`` reads and writes ``evidence/``, ``keys`` says what a result depends on.

``matrix`` is the grid of patches and releases, ``gpu_record`` the results of a GPU, ``declared`` compares when targets
are called with what the catalogue says.
"""
