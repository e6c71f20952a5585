"""Tests on a GPU: the cases of ``tests/gpu``, ``gpu.py`` that runs them, and the bundle for another machine."""
