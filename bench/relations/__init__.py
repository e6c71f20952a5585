"""Ask every release: ``asking`` asks what is not known, ``inside`` asks in a release, ``known`` keeps answers by key.

``ledger`` compares them with the ledger of causes, and ``record`` keeps what a page needs in ``evidence/relations``.

    python -m bench.relations [--releases 1.16.0] [--trainers SFT,DPO] [--relations resume] [--off] [--shard 3/20]
"""
