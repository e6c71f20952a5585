"""The ``report`` of a process, its ``table``, the ``explanation`` of a patch, and the ``trail`` of its gates.

``sentences`` puts decisions and evidence into words, ``lines`` folds them for a terminal, ``runs`` are the runs of
this process in the report, and ``effects`` say what a repair changed in one.
"""
