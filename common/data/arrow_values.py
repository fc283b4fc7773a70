"""Values of Arrow columns as plain Python values, by the column's type.

`to_pylist` gives the stored form of some types: the source text of JSON, a tensor's numbers in one flat list,
a map as pairs. Guarantees: a value is the one that was written, and no part of it is dropped in silence.
"""

import json
from collections.abc import Callable
from typing import Any

from tidemill.common.data.row_file import check_column_names, parse_json

Convert = Callable[[Any], Any]


def converter_of(kind: Any) -> Convert | None:
    """How a value that `to_pylist` gives for the Arrow type `kind` becomes a plain value.

    Returns:
        A function, which raises ValueError where the value is damaged, and never gets None; None where the
        value is a plain one already.

    Raises:
        ValueError: an object of this type has two fields of one name.
    """
    import pyarrow

    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _converter_of_extension(kind)
    if types.is_dictionary(kind):
        return converter_of(kind.value_type)
    if types.is_map(kind):
        return _converter_of_map(kind)
    if types.is_struct(kind):
        return _converter_of_struct(kind)
    if hasattr(kind, "value_type"):  # lists of any kind
        return _converter_of_list(kind)
    return None


def convert(converter: Convert | None, value: Any) -> Any:
    """The plain value; None stays None."""
    return value if converter is None or value is None else converter(value)


def _converter_of_extension(kind: Any) -> Convert | None:
    if kind.extension_name == "arrow.json":
        return _parse_column
    if kind.extension_name == "arrow.uuid":
        return str
    if kind.extension_name == "arrow.fixed_shape_tensor":
        shape = list(kind.shape)
        order = list(kind.permutation or range(len(shape)))
        convert_item = converter_of(kind.value_type)
        assert convert_item is None, "a tensor holds numbers"
        import numpy as np  # late: this module is imported by commands that only read a config

        return lambda numbers: np.array(numbers, dtype=object).reshape(shape).transpose(order).tolist()
    return converter_of(kind.storage_type)


def _parse_column(text: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"its text is not valid JSON: {error.msg} at column {error.colno}") from None


def _converter_of_map(kind: Any) -> Convert:
    convert_key = converter_of(kind.key_type)
    convert_item = converter_of(kind.item_type)

    def convert_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        plain = {convert(convert_key, key): convert(convert_item, item) for key, item in pairs}
        if len(plain) != len(pairs):
            raise ValueError(f"its map has a key twice; the keys are {[key for key, _ in pairs]}")
        return plain

    return convert_map


def _converter_of_struct(kind: Any) -> Convert | None:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    check_column_names([field.name for field in fields])
    converters = {field.name: converter_of(field.type) for field in fields}
    if not any(converters.values()):
        return None
    return lambda columns: {name: convert(converters[name], value) for name, value in columns.items()}


def _converter_of_list(kind: Any) -> Convert | None:
    converter = converter_of(kind.value_type)
    if converter is None:
        return None
    return lambda items: [convert(converter, item) for item in items]
