"""Lists of model types that training needs: types whose rows can be packed, and types without some feature.

They are lists because only a test run shows that a type computes the same results packed (`make families`).
"""

from __future__ import annotations

PACKING_FAMILIES = frozenset(
    """
    afmoe apertus arcee axk1 bamba beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v2
    deepseek_v3 diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3
    gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba
    jetmoe laguna lfm2 lfm2_moe llama llama4 llama4_text mellum mimo_v2_flash minicpm3 minimax minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral moss_transcribe_diarize nanochat nemotron nemotron_h olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()
)
"""Model types in which tokens interact only through attention that transformers dispatches by name, windows included,
and through mixers that the family table names (`mixer_role`); `make families` checks each."""

WITHOUT_ADAPTERS = {"reformer": "its reversible layers pass no gradient to them"}
"""Model types that cannot learn adapters, with the reason."""

WITHOUT_ROUTER_LOSSES = frozenset(["doge", "gemma4_text"])
"""Model types whose router has no logit per expert: in Doge an expert is a pair of the router's keys; Gemma 4's router
returns probabilities."""
