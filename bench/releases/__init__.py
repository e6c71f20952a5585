"""TRL's releases: ``layout`` lays them out, ``releases.yaml`` and ``stacks/`` pin what they run on.

``trl_code`` has digests of their code. ``new_release`` takes a new one in, with ``import_modules``, ``judgement``,
``release_report`` and ``yaml_edits``; ``supports`` finds the transformers that it works with.
"""
