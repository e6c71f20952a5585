"""Ask every release: ``asking`` asks what is not known, ``inside`` asks in a release, ``known`` keeps answers by key.

``ledger`` compares them with the ledger of causes, ``record`` keeps what a page needs in ``evidence/relations``, and
``repairing`` finds which patch repairs what. ``release`` asks a release and the one before, ``compared`` finds what is
new, and ``compared_report`` writes it down. ``control`` counts the bugs of the catalogue that are found, and
``unseen.yaml`` says why some cannot be.

    python -m bench.relations [--releases 1.16.0] [--trainers SFT,DPO] [--relations resume] [--off] [--shard 3/20]
"""
