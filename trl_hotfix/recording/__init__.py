"""The record of a run: the ``callback`` that writes it, and its comparison between ``ranks``.

``trackers`` and ``model_cards`` write it into trackers and model cards. ``failures`` keeps a run going if that fails.
"""
