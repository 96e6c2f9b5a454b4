"""Protobuf messages of Tinker's API: what a training command carries, and what its client reads as a result.

The schema is that of the client's messages, by observation of version 0.38, with the fields that this server reads or
writes; a parser skips the others. Maps are lists of entries with a key and a value, and enumerations are integers,
which are the same on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import Completion

_SCHEMA = """
ForwardBackwardRequest: model_id=1 string; seq_id=2 int32; data=3 Datum*; loss_fn=4 string; loss_fn_config=5 Number*;
    forward_only=6 bool; loss_fn_config_v2=7 Value*
Number: key=1 string; value=2 double
Value: key=1 string; value=2 NumberOrText
NumberOrText: number=1 double; text=2 string
Datum: model_input=1 Chunk*; loss_fn_inputs=2 Input*
Chunk: encoded_text=1 EncodedText
EncodedText: tokens=1 bytes
Input: key=1 string; value=2 Tensor
Tensor: dense=1 bytes; sparse_csr=2 Sparse; dtype=3 int32; shape=4 int64*
Sparse: values=1 bytes; crow_indices=2 bytes; col_indices=3 bytes
ForwardBackwardOutput: loss_fn_output_type=1 string; loss_fn_outputs=2 ArrayRecord*; metrics=3 Number*
ArrayRecord: type_tag=1 string; fields=2 Field*; num_datums=3 int64
Field: key=1 string; value=2 BatchedTensor
BatchedTensor: data=1 bytes; offsets=2 bytes; dtype=3 int32; trailing_shape=4 int64*
SampleResponse: sequences=1 SampledSequence*; prompt_logprobs=2 bytes; topk_prompt_logprobs=3 TopLogprobs
SampledSequence: stop_reason=1 int32; tokens=2 bytes; logprobs=3 bytes; topk_sampled_logprobs=4 TopLogprobs
TopLogprobs: token_ids=1 bytes; logprobs=2 bytes; k=3 uint32; length=4 uint32
"""
_FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_WIRE_BYTES = {1: 8, 5: 4}
"""Bytes of a value by its type on the wire."""
_MOST_FIELDS = 2**18
_STOP_REASONS = {"stop": 0, "length": 1}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="hybrid_rlhf/tinker.proto", package="hybrid_rlhf_tinker", syntax="proto3"
    )  # proto3: a string that is not UTF-8 is an error
    kinds = descriptor_pb2.FieldDescriptorProto
    for line in _SCHEMA.replace(";\n", "; ").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for field in fields.split(";"):
            place, _, kind = field.strip().partition(" ")
            key, _, number = place.partition("=")
            repeated = kind.endswith("*")
            kind = kind.rstrip("*")
            entry = message.field.add(
                name=key, number=int(number), label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            )
            if kind[0].isupper():
                entry.type = kinds.TYPE_MESSAGE
                entry.type_name = f".{file.package}.{kind}"
            else:
                entry.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
        for message in file.message_type
    }


MESSAGES = _message_classes()
"""Message classes by name."""


@dataclass(frozen=True)
class Datum:
    """One sequence of a training command."""

    tokens: np.ndarray
    """[N] int64, the model's input."""
    inputs: Mapping[str, np.ndarray]
    """[N] arrays of the loss: target_tokens int64, the others float32."""


def read_forward_backward(body: bytes) -> Any:
    """Read the message of a training command; `loss_config` and `read_datum` read its parts.

    Raises:
        UserError: for other bytes, or without the name of a model.
    """
    message = MESSAGES["ForwardBackwardRequest"]()
    _require_few_fields(body, message.DESCRIPTOR)
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError("the body must be a ForwardBackwardRequest in protobuf, got other bytes: send one") from error
    if not message.model_id:
        raise UserError("model_id must name a model, got none: create one and send its id")
    return message


def loss_config(message: Any) -> dict[str, float | str]:
    """The settings of the loss of a training command."""
    numbers = {entry.key: entry.value for entry in message.loss_fn_config}
    return numbers | {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}


def _require_few_fields(body: bytes, kind: Any) -> None:
    """Raise UserError for a message with more fields than may be read, before they become objects.

    Args:
        body: the bytes, in order or not.
        kind: descriptor of the message.
    """
    count = 0
    parts = [(0, len(body), kind)]
    while parts:
        place, end, kind = parts.pop()
        while place < end:
            tag, place = _varint(body, place)
            wire = tag & 7
            count += 1
            if wire == 2:
                length, place = _varint(body, place)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((place, min(end, place + length), field.message_type))
                elif field is not None and field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_ENUM):
                    count += length  # numbers, packed
                place += length
            elif wire == 0:
                _, place = _varint(body, place)
            else:
                place += _WIRE_BYTES.get(wire, 0)
            if count > _MOST_FIELDS:
                raise UserError(
                    f"a command has at most {_MOST_FIELDS} fields, which the parts of its datums are, got more: send "
                    "several commands"
                )


def _varint(body: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it; at the end of the bytes the number ends too."""
    value = shift = 0
    for byte in body[place : place + 10]:
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, place


def read_datum(message: Any, index: int) -> Datum:
    """Read a sequence.

    Args:
        message: its message.
        index: its place in the command, for errors.

    Raises:
        UserError: for a chunk that is not text, or a tensor whose bytes do not have its type and shape.
    """
    chunks = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError(f"model_input must be text, datum {index} has another chunk: leave images and audio out")
        chunks.append(_numbers(chunk.encoded_text.tokens, _DTYPES[3], f"model_input of datum {index}"))
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    inputs = {entry.key: _array(entry.value, f"{entry.key[:100]} of datum {index}") for entry in message.loss_fn_inputs}
    return Datum(tokens, inputs)


def _array(tensor: Any, what: str) -> np.ndarray:
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{what} must be float32, int64 or int32, got dtype {tensor.dtype}: convert it")
    dtype = _DTYPES[tensor.dtype]
    if len(tensor.shape) > 2:
        raise UserError(f"{what} must have one or two dimensions, got {len(tensor.shape)}: send a vector")
    shape = list(tensor.shape)
    if tensor.HasField("sparse_csr"):
        values = _dense(tensor.sparse_csr, dtype, shape, what)
    else:
        values = _numbers(tensor.dense, dtype, what)
    if shape and (min(shape) < 0 or math.prod(shape) != values.size):
        raise UserError(f"{what} must have the shape {shape}, got {values.size} values: send as many")
    return values.reshape(shape) if shape else values


def _dense(sparse: Any, dtype: np.dtype[Any], shape: Sequence[int], what: str) -> np.ndarray:
    """The values of a sparse matrix of one column, which is all that a loss of one target per position has."""
    if len(shape) != 2 or shape[1] != 1:
        raise UserError(f"{what} must have one value per position, got the shape {list(shape)}: send a vector")
    values = _numbers(sparse.values, dtype, what)
    rows = np.diff(_numbers(sparse.crow_indices, _DTYPES[2], what))
    if len(rows) != shape[0] or not np.isin(rows, (0, 1)).all() or rows.sum() != len(values):
        raise UserError(f"{what} must be a sparse matrix in the CSR layout, its rows do not fit: send it dense")
    result = np.zeros(shape[0], dtype)
    result[rows == 1] = values
    return result


def _numbers(data: bytes, dtype: np.dtype[Any], what: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{what} must be whole {dtype.itemsize}-byte numbers, got {len(data)} bytes: send all of them")
    return np.frombuffer(data, dtype)


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The result of a training command.

    Args:
        logprobs: [N] float32 log-probs of the targets of each sequence.
        metrics: their names end with how the client adds up several commands, as in loss:sum.
    """
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for key, value in metrics.items():
        message.metrics.add(key=key, value=value)
    record = message.loss_fn_outputs.add(num_datums=len(logprobs))
    arrays = [np.ascontiguousarray(entry, "<f4") for entry in logprobs]
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
    field = record.fields.add(key="logprobs")
    field.value.data = b"".join(array.tobytes() for array in arrays)
    field.value.offsets = offsets.tobytes()
    field.value.dtype = _FLOAT32
    result: bytes = message.SerializeToString()
    return result


def sample_response(
    completions: Mapping[int, Completion],
    alternatives: Mapping[int, Sequence[Sequence[tuple[int, float]]]],
    prompt_logprobs: Sequence[float] | None,
) -> bytes:
    """The result of a sampling request.

    Args:
        completions: the samples by number.
        alternatives: the most likely tokens with their log-probs, for each token of a sample; empty: not asked for.
        prompt_logprobs: one per token of the prompt, NaN where there is none, or None.
    """
    message = MESSAGES["SampleResponse"]()
    for sample, completion in sorted(completions.items()):
        assert completion.finish_reason is not None
        entry = message.sequences.add(
            stop_reason=_STOP_REASONS[completion.finish_reason],
            tokens=np.asarray(completion.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs, "<f4").tobytes(),
        )
        if sample in alternatives:
            top = np.asarray(alternatives[sample], dtype=float)  # [tokens, k, 2]
            entry.topk_sampled_logprobs.token_ids = top[..., 0].astype("<i4").tobytes()
            entry.topk_sampled_logprobs.logprobs = top[..., 1].astype("<f4").tobytes()
            entry.topk_sampled_logprobs.length = top.shape[0]
            entry.topk_sampled_logprobs.k = top.shape[1]
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    result: bytes = message.SerializeToString()
    return result
