from __future__ import annotations

import pytest

from trl_hotfix.checking import families

pytestmark = pytest.mark.needs_trl


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_each_family_has_a_small_model(family: str) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    whole = CONFIG_MAPPING[family]()
    fields = families.small(whole.to_dict(), 300)
    config = CONFIG_MAPPING[family].from_dict({**fields, "pad_token_id": 0})
    auto = transformers.AutoModel if family in families.ENCODERS else transformers.AutoModelForCausalLM
    import torch

    model = auto.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) < 2_000_000
    model(input_ids=torch.tensor([[5, 6, 7]]))


def test_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="'mamba' is not among"):
        families.small({"model_type": "mamba"})
