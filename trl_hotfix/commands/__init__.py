"""The command line: each command has a module of its name, with the click ``command`` and the ``Answer`` of ``--json``.

``main`` is the entry point; ``common`` has the exit codes and options that commands share.
"""
