"""JSON bodies of Tinker's API. Keys that this server does not know are skipped, as newer clients send more."""

from __future__ import annotations

import json
from reprlib import Repr
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.bodies import MOST_STOP_TOKENS, StopTexts
from hybrid_rlhf.serving.training.store import JsonObject, Kind

_Id = Annotated[str, Field(min_length=1, max_length=200)]
_Seq = Annotated[int, Field(ge=0, le=2**53)]
_Command = Annotated[int, Field(ge=1, le=2**53)]
_Path = Annotated[str, Field(min_length=1, max_length=500)]
_Number = Annotated[float, Field(ge=0)]
_Coefficient = Annotated[float, Field(ge=0, lt=1)]
_Seconds = Annotated[int, Field(ge=1, le=2**31)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_MOST_METADATA = 2**14
"""Characters of the metadata of a session, a model or a checkpoint, in JSON: they stay in memory and in lists."""


def _small(metadata: Any) -> Any:
    if len(json.dumps(metadata)) > _MOST_METADATA:
        raise PydanticCustomError("too_long", "it has at most {most} characters in JSON", {"most": _MOST_METADATA})
    return metadata


_Metadata = Annotated[JsonObject, BeforeValidator(_small)]
_MOST_CHUNKS = 4096
_shown = Repr()
_shown.maxstring = _shown.maxother = 100


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    most_bytes: ClassVar = 2**20
    """Largest size, decompressed."""


BodyT = TypeVar("BodyT", bound=_Body)


class EmptyBody(_Body):
    """client/config, client/dynamic_config, telemetry: no key is read."""


class SessionBody(_Body):
    """create_session."""

    user_metadata: _Metadata | None = None


class SessionId(_Body):
    """session_heartbeat."""

    session_id: _Id


class LoraBody(_Body):
    """The adapter of a new model; the output head never has one."""

    rank: Annotated[int, Field(ge=1, le=512)] = 32
    seed: _Seq | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(_Body):
    """Kind of the optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(_Body):
    """create_model."""

    session_id: _Id
    model_seq_id: _Seq
    base_model: _Path
    lora_config: LoraBody = LoraBody()
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: _Metadata | None = None


class ModelId(_Body):
    """get_info, unload_model."""

    model_id: _Id


class CommandBody(ModelId):
    """What every command of a model has."""

    seq_id: _Command | None = None


class AdamBody(_Body):
    """AdamW's constants of one update."""

    learning_rate: _Number = 1e-4
    beta1: _Coefficient = 0.9
    beta2: _Coefficient = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: _Number = 0.0
    grad_clip_norm: _Number = 0.0


class OptimStepBody(CommandBody):
    """optim_step."""

    adam_params: AdamBody


class CheckpointBody(CommandBody):
    """What every command has that writes a checkpoint."""

    command: ClassVar[str]
    """Its name."""
    kind: ClassVar[Kind]
    path: _Path | None = None
    ttl_seconds: _Seconds | None = None
    user_metadata: Annotated[dict[str, str], BeforeValidator(_small)] | None = None


class SaveBody(CheckpointBody):
    """save_weights."""

    command = "save_weights"
    kind = "weights"
    overwrite: bool = False


class SaveForSamplerBody(CheckpointBody):
    """save_weights_for_sampler."""

    command = "save_weights_for_sampler"
    kind = "sampler_weights"
    sampling_session_seq_id: _Seq | None = None


class SaveExternalBody(CheckpointBody):
    """save_weights_external."""

    command = "save_weights_external"
    kind = "external_weights"
    path: _Path
    age_encryption_recipients: None = None


class LoadBody(_Body):
    """load_weights, onto a model or as the beginning of a new one."""

    path: _Path
    optimizer: bool
    model_id: _Id | None = None
    seq_id: _Command | None = None
    session_id: _Id | None = None
    model_seq_id: _Seq | None = None
    user_metadata: _Metadata | None = None


class SamplerBody(_Body):
    """create_sampling_session."""

    session_id: _Id
    sampling_session_seq_id: _Seq
    base_model: _Path | None = None
    model_path: _Path | None = None


class SamplerId(_Body):
    """join_sampling_session."""

    sampling_session_id: _Id


class TextChunk(_Body):
    """Tokens of a prompt."""

    tokens: Annotated[list[_Token], Field(fail_fast=True)]


class PromptBody(_Body):
    """A prompt."""

    chunks: Annotated[list[TextChunk], Field(fail_fast=True, max_length=_MOST_CHUNKS)]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingBody(_Body):
    """How a prompt is completed."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopTexts | Annotated[list[_Token], Field(fail_fast=True, max_length=MOST_STOP_TOKENS)] | None = None
    temperature: _Number = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(_Body):
    """asample."""

    most_bytes = 2**24

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    sampling_session_id: _Id | None = None
    seq_id: _Seq | None = None
    base_model: _Path | None = None
    model_path: _Path | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=0)] = 0
    target_prompt_logprobs: None = None


class RetrieveBody(_Body):
    """retrieve_future, cancel_future."""

    request_id: _Id


class PathBody(_Body):
    """weights_info."""

    tinker_path: _Path


class TtlBody(_Body):
    """The remaining time of a checkpoint; None: it never expires."""

    ttl_seconds: _Seconds | None = None


def read_body(content: Any, kind: type[BodyT]) -> BodyT:
    """Read a JSON object.

    Raises:
        UserError: naming the first faulty key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        place = errors[0]["loc"][:2]  # of a union, rather the rule that its value breaks than a type that it has not
        broken = [entry for entry in errors if entry["loc"][:2] == place and not entry["type"].endswith("_type")]
        first = (broken or errors)[0]
        parts = [
            str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()
        ]  # no kind of a union
        key = ".".join(parts) or "the body"
        got = _shown.repr(first["input"])
        raise UserError(
            f"{key} must be as Tinker's API has it ({first['msg'][:200]}), got {got}: correct it"
        ) from error
