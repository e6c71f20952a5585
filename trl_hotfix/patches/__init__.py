"""One module for each patch, in the folder of its family: its wrappers and its self-test.

Its name is the patch's id with underscores. A family is a trainer, or a layer beneath the trainers, that most targets
of a patch are of: ``sft``, ``dpo``, ``grpo`` (with RLOO), ``preference`` (KTO, ORPO, CPO, BCO, rewards), ``online``
(online DPO, XPO, Nash-MD), ``distillation`` (GKD, GOLD), ``adapters``, ``callbacks``, ``heads`` (of language models),
``data``, ``beneath`` (what transformers, accelerate or DeepSpeed do to every trainer). A family names no module:
patches.yaml has a section for each.
"""
