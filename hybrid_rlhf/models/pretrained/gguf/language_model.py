"""The causal LM inside a vision-language model, which a GGUF file can have."""

from __future__ import annotations

from accelerate import init_empty_weights
from torch.nn import Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.models.families.training import SAME_LANGUAGE_MODEL
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.pretrained.gguf.families import FAMILIES
from hybrid_rlhf.models.structure import backbone_of, text_model_of

_OF_WHOLE = ("architectures", "model_type", "torch_dtype")


def language_model(lm: PreTrainedModel) -> PreTrainedModel:
    """A model of text that shares the weights of a vision-language model; any model that cannot become one of the
    families, as it is."""
    text = lm.config.get_text_config()
    kind = SAME_LANGUAGE_MODEL.get(text.model_type, text.model_type)
    if images_refused(lm.config) is not None or kind not in FAMILIES:
        return lm
    fields = {name: value for name, value in text.to_dict().items() if name not in _OF_WHOLE}
    # text has equal positions on all axes
    fields["rope_parameters"] = {key: value for key, value in text.rope_parameters.items() if "mrope" not in key}
    embeddings, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    fields["tie_word_embeddings"] = embeddings is head
    config = AutoConfig.for_model(kind, **fields)
    with init_empty_weights(include_buffers=False):
        causal: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=lm.dtype)
    backbone_of(causal).load_state_dict(text_model_of(lm).state_dict(), assign=True)
    causal.get_output_embeddings().weight = head if isinstance(head, Parameter) else Parameter(head)
    causal.generation_config = lm.generation_config
    return causal.eval()
