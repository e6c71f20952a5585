"""One module a command, of its name: ``command`` is what click runs, ``Answer`` the shape of what ``--json`` prints.

``main`` is the command line, ``common`` what commands share.
"""
