"""What the unit tests of several rooms share. ``tests/unit/conftest.py`` makes it importable as ``helpers``."""
