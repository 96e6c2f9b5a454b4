"""Rows of Arrow data, which Parquet files, Arrow files and data sets of `datasets` contain, with the values that the
same rows have as JSON.

`to_pylist` leaves three types as they are stored: a map is a list of pairs, JSON (`datasets.Json`, `arrow.json`) is
text, and a decimal is no number of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow
from pyarrow import types

from hybrid_rlhf.runtime.files.reading import NotJSON, parse_json

_Decode = Callable[[Any], Any]
_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)


def arrow_rows(batches: Iterable[pyarrow.RecordBatch | pyarrow.Table]) -> Iterator[dict[str, Any]]:
    """The rows of batches, with the nulls that Arrow has for missing columns and keys.

    Raises:
        ValueError: for JSON that cannot be parsed, and a map that has a key twice.
    """
    for batch in batches:
        decode = _decoder(pyarrow.struct(batch.schema)) or _unchanged
        size = rows_at_a_time(batch.schema)
        for start in range(0, batch.num_rows, size):
            yield from map(decode, batch.slice(start, size).to_pylist())


def rows_at_a_time(schema: pyarrow.Schema) -> int:
    """The number of rows to hold in memory: few where they may have images."""
    return 50 if "binary" in str(schema) else 1000


def decimal_number(value: Decimal) -> int | float:
    """A decimal as a number of JSON: an integer if it has no places, otherwise the nearest float."""
    return int(value) if value.is_finite() and value.as_tuple().exponent == 0 else float(value)


def _unchanged(value: Any) -> Any:
    return value


def _decoder(kind: pyarrow.DataType) -> _Decode | None:
    """The function from a value of `to_pylist` to that of JSON; None if they are equal."""
    if isinstance(kind, pyarrow.JsonType):
        return _present(_parsed)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _decoder(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _decoder(kind.value_type)
    if types.is_decimal(kind):
        return _present(decimal_number)
    if types.is_map(kind):
        return _present(_map_decoder(_decoder(kind.key_type) or _unchanged, _decoder(kind.item_type) or _unchanged))
    if any(is_list(kind) for is_list in _LISTS):
        item = _decoder(kind.value_type)
        return None if item is None else _present(lambda values: [item(value) for value in values])
    if types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _decoder(field.type)) is not None}
        if not fields:
            return None
        return _present(lambda value: value | {name: decode(value[name]) for name, decode in fields.items()})
    return None


def _present(decode: _Decode) -> _Decode:
    """A decoder that leaves null as it is."""
    return lambda value: None if value is None else decode(value)


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except NotJSON as error:
        raise ValueError(f"a value of the type JSON is not JSON, {error.reason}") from error


def _map_decoder(key: _Decode, item: _Decode) -> _Decode:
    def decode(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        content = {str(key(name)): item(value) for name, value in pairs}
        if len(content) < len(pairs):
            raise ValueError("a map has a key twice")
        return content

    return decode
