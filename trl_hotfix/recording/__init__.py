"""What happened in the run: the ``callback`` that keeps its record, and the comparison between ``ranks``.

``trackers`` and ``model_cards`` are where the record goes besides; ``failures`` keeps a run going without it.
"""
