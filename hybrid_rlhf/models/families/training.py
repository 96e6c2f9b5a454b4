"""Lists of model types that loading and training need: types whose rows can be packed, types with towers for images or
sound, and types without some feature.

They are lists because only a test run shows that a type computes the same results packed (`make families`).
"""

from __future__ import annotations

PACKING_FAMILIES = frozenset(
    """
    afmoe apertus arcee aria axk1 bamba beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass cohere_compass_text
    cosmos3_omni cwm deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid diffllama ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm_ocr glmasr glmga
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_docling granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    hyperclovax_vision_v2 idefics2 idefics3 internlm3 internvl iquestcoder jais2 jamba jetmoe laguna lfm2 lfm2_moe
    lfm2_vl lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision mellum mimo_v2_flash
    minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral
    ministral3 mistral mistral3 mixtral mllama moss_transcribe_diarize nanochat nemotron nemotron_h olmo olmo2 olmo3
    olmoe opt ovis2 paddleocr_vl persimmon phi phi3 phimoe qianfan_ocr qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    seed_oss smollm3 smolvlm solar_open stablelm starcoder2 vaultgemma video_llama_3 video_llava vipllava voxtral youtu
    """.split()
)
"""Model types in which tokens interact only through attention that transformers dispatches by name, windows included,
and through mixers that the family table names (`mixer_role`); `make families` checks each."""

TOWER_FAMILIES = frozenset(
    """
    aria cohere_compass cosmos3_omni deepseek_vl deepseek_vl_hybrid glm46v glm4v glm4v_moe glm_ocr glmasr glmga
    granite_docling hyperclovax_vision_v2 idefics2 idefics3 internvl lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next
    llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mllama ovis2
    paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl
    qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava voxtral
    """.split()
)
"""Model types that AutoModelForCausalLM builds without their towers for images or sound, or not at all. With the towers
they compute the same text, and are saved as they were loaded; `make families` checks each."""

TOWERS_INSIDE = {
    "git": ("git.image_encoder", "git.visual_projection", "git.img_temporal_embedding"),
    "phi4_multimodal": ("model.embed_tokens_extend",),
}
"""Modules that text never reads, of the model types that have no separate language model."""

SAME_LANGUAGE_MODEL = {
    "glm46v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Types of language models beside a tower that compute text as another type does: their rotary positions have three
axes, which are equal for text."""

WITHOUT_ADAPTERS = {"reformer": "its reversible layers pass no gradient to them"}
"""Model types that cannot learn adapters, with the reason."""

WITHOUT_ROUTER_LOSSES = frozenset(["doge", "gemma4_text"])
"""Model types whose router has no logit per expert: in Doge an expert is a pair of the router's keys; Gemma 4's router
returns probabilities."""
