"""The ``report`` of a process, its ``table``, the ``explanation`` of a patch, and the ``trail`` of its gates.

``sentences`` puts decisions and evidence into words.
"""
