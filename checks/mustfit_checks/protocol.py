"""Scenarios and traces as lines of JSON: writing, strict reading, and the JSON Schema.

Reading refuses whatever a scheduler in another language might understand otherwise: keys that are
there twice, unknown fields, numbers in quotes, ``3.0`` for ``3``, whole numbers beyond 64 bits.
Each refusal is one line that says what, where and how to mend it.

What is in order is read in one pass by msgspec. Only what is not is read again, slowly, to find the
exact place.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Literal, TypeVar

import attrs
import msgspec

from mustfit_spec import Scenario, Trace

ProtocolErrorKind = Literal["not-utf8", "not-json", "invalid"]

_Message = TypeVar("_Message", Scenario, Trace)

_INT64_MIN = -(2**63)
_INT64_MAX = 2**63 - 1
#: More than this of a stranger's text is not repeated in a message.
_QUOTED_LIMIT = 60

#: vLLM's names for what docs/scope.md leaves out; a trailing ``*`` stands for any ending.
OUT_OF_SCOPE = (
    "async_scheduling",
    "attention_chunk_size",
    "cache_salt",
    "cp_*",
    "cross_attn*",
    "data_parallel*",
    "dcp_*",
    "decode_context_parallel*",
    "disable_chunked_mm_input",
    "disable_hybrid_kv_cache_manager",
    "draft*",
    "eagle*",
    "ec_connector*",
    "ec_transfer*",
    "enable_lora",
    "enable_mamba*",
    "enable_mm*",
    "enable_prompt_embeds",
    "encoder*",
    "grammar*",
    "guided_*",
    "hash_block_size",
    "hybrid*",
    "is_encoder_decoder",
    "is_multimodal*",
    "kv_cache_groups",
    "kv_connector*",
    "kv_load_failure_policy",
    "kv_offloading*",
    "kv_sharing_fast_prefill",
    "kv_transfer*",
    "limit_mm*",
    "load_kv_async",
    "lora*",
    "mamba*",
    "max_long_partial_prefills",
    "max_lora*",
    "max_num_encoder_input_tokens",
    "max_num_partial_prefills",
    "mm_*",
    "multi_modal*",
    "multimodal*",
    "num_draft*",
    "num_encoder*",
    "num_external_computed_tokens",
    "num_prompt_embeds",
    "num_spec*",
    "pcp_*",
    "pipeline_parallel*",
    "pooling*",
    "prefill_context_parallel*",
    "prefill_schedule_interval",
    "prompt_embed*",
    "prompt_is_token_ids",
    "resumable",
    "runner_type",
    "scheduler_cls",
    "sliding_window*",
    "spec_token*",
    "speculative*",
    "streaming*",
    "structural_tag",
    "structured_output*",
    "use_eagle*",
)
_OUT_OF_SCOPE = re.compile(
    "|".join(re.escape(name).replace(r"\*", ".*") for name in OUT_OF_SCOPE), re.DOTALL
)


class ProtocolError(ValueError):
    """A line that is no scenario, or no trace. Its text is one line: what, where, how to mend it.

    Attributes:
        kind: ``not-utf8``, ``not-json``, or ``invalid``: JSON, but not what it should be.
        path: The place in the line, such as ``$.requests[0].prompt_token_ids[2]``.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str = "$",
        mend: str = "",
        kind: ProtocolErrorKind = "invalid",
        where: str = "",
    ) -> None:
        self.kind = kind
        self.path = path
        self._parts = (what, mend)
        super().__init__(_one_line(f"{where}{path}: {what}{'; ' if mend else ''}{mend}"))

    def at(self, where: str) -> ProtocolError:
        """The same error, with the file and line number that it was found at in front."""
        what, mend = self._parts
        return ProtocolError(what, path=self.path, mend=mend, kind=self.kind, where=f"{where}: ")


def _one_line(text: str) -> str:
    """The text without line breaks and other characters that act on a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _quoted(value: object) -> str:
    """A value from outside, as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= _QUOTED_LIMIT else f"{text[:_QUOTED_LIMIT]}…"


# --- The classes, as they are on the wire ---------------------------------------------------------


@attrs.frozen(kw_only=True)
class _Shape:
    """Where in a class's JSON object other objects are, found once from its annotations."""

    names: tuple[str, ...]
    known: frozenset[str]
    objects: tuple[tuple[str, _Shape], ...]
    lists: tuple[tuple[str, _Shape], ...]
    maps: tuple[str, ...]


def _find_hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


#: The annotation of each field of a class, resolved.
_hints: Callable[[type], dict[str, Any]] = functools.cache(_find_hints)


def _required(hint: object) -> tuple[Any, bool]:
    """An annotation without its ``| None``, and whether it had one."""
    if not isinstance(hint, types.UnionType):
        return hint, False
    (rest,) = (arg for arg in hint.__args__ if arg is not types.NoneType)
    return rest, True


def _find_shape(cls: type) -> _Shape:
    objects: list[tuple[str, _Shape]] = []
    lists: list[tuple[str, _Shape]] = []
    maps: list[str] = []
    for name, hint in _hints(cls).items():
        kind, _ = _required(hint)
        args = typing.get_args(kind)
        if typing.get_origin(kind) is dict:
            maps.append(name)
        elif attrs.has(kind):
            objects.append((name, _shape(kind)))
        elif typing.get_origin(kind) is tuple and attrs.has(args[0]):
            lists.append((name, _shape(args[0])))
    return _Shape(
        names=tuple(_hints(cls)),
        known=frozenset(_hints(cls)),
        objects=tuple(objects),
        lists=tuple(lists),
        maps=tuple(maps),
    )


_shape: Callable[[type], _Shape] = functools.cache(_find_shape)


# --- Writing --------------------------------------------------------------------------------------


def encode(obj: Scenario | Trace) -> bytes:
    """The object as one line of JSON, without the line's end.

    Every field is written, those at their defaults too, except where its value is ``None``. Keys
    are in the order of the class, those of dictionaries sorted: equal objects give equal bytes.

    Raises:
        ProtocolError: The object holds what a reader would refuse: a whole number beyond 64 bits,
            or half of a surrogate pair.
    """
    data = _plain(obj, _shape(type(obj)))
    try:
        line = msgspec.json.encode(data)
    except UnicodeEncodeError:
        # Only this encoder writes half of a surrogate pair, and only to find its place.
        _verify(json.loads(json.dumps(data)), type(obj), "$")
        raise
    if _has_long_number(line):
        _verify(json.loads(line), type(obj), "$")
    return line


def _plain(obj: object, shape: _Shape) -> dict[str, Any]:
    """The object as a dictionary, without what is ``None``, maps in the order of their keys."""
    data: dict[str, Any] = {}
    for name in shape.names:
        value = getattr(obj, name)
        if value is not None:
            data[name] = value
    for name in shape.maps:
        if name in data:
            data[name] = dict(sorted(data[name].items()))
    for name, inner in shape.objects:
        if name in data:
            data[name] = _plain(data[name], inner)
    for name, inner in shape.lists:
        if name in data:
            data[name] = [_plain(item, inner) for item in data[name]]
    return data


# --- Reading what is in order ---------------------------------------------------------------------


def decode_scenario(line: bytes | str) -> Scenario:
    """The scenario in a line of JSON.

    Raises:
        ProtocolError: It is none.
    """
    return _decode(line, Scenario)


def decode_trace(line: bytes | str) -> Trace:
    """The trace in a line of JSON.

    Raises:
        ProtocolError: It is none.
    """
    return _decode(line, Trace)


def _decode(line: bytes | str, cls: type[_Message]) -> _Message:
    found = _decode_if_in_order(line, cls)
    return _decode_carefully(line, cls) if found is None else found


class _UnsureError(Exception):
    """Something is, or may be, wrong with a line."""


def _decode_if_in_order(line: bytes | str, cls: type[_Message]) -> _Message | None:
    """The object, or ``None`` if there is any doubt about the line."""
    try:
        data = msgspec.json.decode(line)
        found = msgspec.convert(data, cls)
        keys = _count_keys(data, _shape(cls))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, _UnsureError):
        return None
    raw = line.encode() if isinstance(line, str) else line
    if _has_long_number(raw):
        return None
    # A key that is there twice is counted once, but its colons are two. Colons in strings only add
    # to the other side, so that equality is proof.
    if raw.count(b":") != keys and _has_duplicates(raw):
        return None
    return found


def _count_keys(data: dict[str, Any], shape: _Shape) -> int:
    """The keys of all objects in the data, whose types are known to be right."""
    if not shape.known >= data.keys():
        raise _UnsureError
    count = len(data)
    for name in shape.maps:
        count += len(data.get(name) or ())
    for name, inner in shape.objects:
        if data.get(name) is not None:
            count += _count_keys(data[name], inner)
    for name, inner in shape.lists:
        for item in data.get(name) or ():
            count += _count_keys(item, inner)
    return count


_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_INT64_DIGITS = b"0" * len(str(_INT64_MAX))


def _has_long_number(line: bytes) -> bool:
    """Whether any run of digits is long enough for a number beyond 64 bits."""
    return _INT64_DIGITS in line.translate(_DIGITS_TO_ZERO)


def _has_duplicates(line: bytes) -> bool:
    """Whether any object in the line, which is JSON, has a key twice."""
    try:
        json.loads(line, object_pairs_hook=_unique)
    except _UnsureError:
        return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _UnsureError
    return found


# --- Reading what is not in order -----------------------------------------------------------------


@attrs.frozen
class _Odd:
    """A number that JSON's readers disagree about, kept until its path is known."""

    what: str
    mend: str


class _Object(dict[str, Any]):
    """A JSON object that knows whether a key was there twice."""

    duplicate: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object()
    for key, value in pairs:
        if key in found:
            found.duplicate = key
        found[key] = value
    return found


def _constant(name: str) -> _Odd:
    return _Odd(f"{name} is not a JSON number", "give a finite number")


def _whole(text: str) -> int | _Odd:
    # Longer ones are not converted: the time for that grows with the square of their length.
    if len(text) <= len(str(_INT64_MIN)) and _INT64_MIN <= (value := int(text)) <= _INT64_MAX:
        return value
    return _Odd(
        f"a whole number of {len(text.lstrip('-'))} digits is beyond 64 bits",
        f"keep to {_INT64_MIN} up to {_INT64_MAX}",
    )


def _real(text: str) -> float | _Odd:
    value = float(text)
    if math.isfinite(value):
        return value
    return _Odd("a number too large for a double", "give a finite number")


def _decode_carefully(line: bytes | str, cls: type[_Message]) -> _Message:
    """Reads a line step by step, so that each complaint has an exact place."""
    text = line if isinstance(line, str) else _text(line)
    try:
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_real,
            parse_int=_whole,
        )
    except RecursionError:
        raise ProtocolError(
            "nested too deeply", mend=f"give a {cls.__name__.lower()} as the schema has it"
        ) from None
    except json.JSONDecodeError as error:
        raise ProtocolError(
            f"not JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}",
            mend="write one JSON object a line",
            kind="not-json",
        ) from None
    _verify(data, cls, "$")
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise _from_msgspec(error) from None


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}",
            mend="write the line in UTF-8",
            kind="not-utf8",
        ) from None


_MSGSPEC_PATH = re.compile(r" - at `(?P<path>\$[^`]*)`$")


def _from_msgspec(error: msgspec.ValidationError) -> ProtocolError:
    """What a class's own validators say, with its object's path."""
    text = str(error)
    if found := _MSGSPEC_PATH.search(text):
        return ProtocolError(text[: found.start()], path=found["path"])
    return ProtocolError(text)


def _member(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_]\w{0,60}", key) else f"{path}[{_quoted(key)}]"


_WANTED: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
    dict: "an object",
}


def _kind_of(value: object) -> str:
    """What a value is, in JSON's terms."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the string {_quoted(value)}"
    return "null" if value is None else _quoted(value)


def _wrong_type(value: object, kind: object, path: str) -> ProtocolError:
    wanted = _described(kind)
    mend = ""
    if kind in {int, float} and isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        mend = "write it without the quotes"
    elif kind is int and isinstance(value, float) and value.is_integer():
        mend = f"write it as {value:.0f}" if abs(value) < _INT64_MAX else mend
    return ProtocolError(f"expected {wanted}, not {_kind_of(value)}", path=path, mend=mend)


def _verify(
    value: object, hint: object, path: str, metadata: Mapping[str, Any] = types.MappingProxyType({})
) -> None:
    """Raises the first complaint about a JSON value that should be of the annotated type."""
    kind, optional = _required(hint)
    if isinstance(value, _Odd):
        raise ProtocolError(value.what, path=path, mend=value.mend)
    if optional and value is None:
        return
    origin = typing.get_origin(kind)
    if attrs.has(kind):
        _verify_object(_as(value, dict, kind, path), kind, path)
    elif origin is tuple:
        item = typing.get_args(kind)[0]
        for index, element in enumerate(_as(value, list, kind, path)):
            _verify(element, item, f"{path}[{index}]")
    elif origin is dict:
        _verify_map(_as(value, dict, kind, path), typing.get_args(kind)[1], path)
    elif origin is Literal:
        _verify_choice(value, typing.get_args(kind), path)
    elif kind is str:
        _verify_string(_as(value, str, kind, path), path)
    elif kind is bool:
        _as(value, bool, kind, path)
    else:
        _verify_number(value, kind, path)
    _verify_bounds(value, metadata, path)


_Json = TypeVar("_Json")


def _as(value: object, wanted: type[_Json], kind: object, path: str) -> _Json:
    if not isinstance(value, wanted):
        raise _wrong_type(value, kind, path)
    return value


def _verify_object(value: dict[str, Any], cls: type, path: str) -> None:
    _verify_keys(value, path)
    hints = _hints(cls)
    for key in value:
        if key not in hints:
            raise _unknown_field(key, value, hints, path)
    for field in attrs.fields(cls):
        if field.name in value:
            here = _member(path, field.name)
            _verify(value[field.name], hints[field.name], here, field.metadata)
        elif field.default is attrs.NOTHING:
            wanted = _described(hints[field.name])
            raise ProtocolError(
                "missing", path=_member(path, field.name), mend=f"add the field, {wanted}"
            )


def _described(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(_quoted, typing.get_args(kind)))}"
    return _WANTED.get(typing.get_origin(kind) or kind, "an object")


def _verify_keys(value: dict[str, Any], path: str) -> None:
    duplicate = getattr(value, "duplicate", None)
    if duplicate is not None:
        raise ProtocolError(
            f"the key {_quoted(duplicate)} is there more than once",
            path=_member(path, duplicate),
            mend="keep one of them",
        )
    for key in value:
        _verify_string(key, _member(path, key))


def _unknown_field(
    key: str, value: dict[str, Any], hints: Mapping[str, Any], path: str
) -> ProtocolError:
    here = _member(path, key)
    if _OUT_OF_SCOPE.fullmatch(key):
        what = f"{_quoted(key)[1:-1]} is not in scope (see docs/scope.md)"
        return ProtocolError(what, path=here, mend="leave it out")
    missing = [name for name in hints if name not in value]
    near = difflib.get_close_matches(key[:_QUOTED_LIMIT], missing, n=1)
    mend = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(hints)}"
    return ProtocolError(f"unknown field {_quoted(key)}", path=here, mend=mend)


def _verify_map(value: dict[str, Any], kind: object, path: str) -> None:
    _verify_keys(value, path)
    for key, element in value.items():
        _verify(element, kind, _member(path, key))


def _verify_choice(value: object, choices: tuple[str, ...], path: str) -> None:
    if isinstance(value, str) and value in choices:
        return
    listed = ", ".join(map(_quoted, choices))
    near = difflib.get_close_matches(str(value)[:_QUOTED_LIMIT], choices, n=1)
    mend = f'did you mean "{near[0]}"?' if near else ""
    raise ProtocolError(f"{_kind_of(value)} is not one of {listed}", path=path, mend=mend)


def _verify_string(value: str, path: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError(
            "half of a surrogate pair", path=path, mend="write the whole pair, or the character"
        ) from None


def _verify_number(value: object, kind: object, path: str) -> None:
    # A bool is an int to Python, not to JSON.
    types_of_kind = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, types_of_kind):
        raise _wrong_type(value, kind, path)
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        odd = _whole(str(value))
        if isinstance(odd, _Odd):
            raise ProtocolError(odd.what, path=path, mend=odd.mend)


_MEND_EMPTY: Mapping[type, str] = {str: "give it a name", list: "give at least one element"}


def _verify_bounds(value: object, metadata: Mapping[str, Any], path: str) -> None:
    if not isinstance(value, (int, float)):
        if metadata.get("not_empty") and not value:
            raise ProtocolError("must not be empty", path=path, mend=_MEND_EMPTY[type(value)])
        return
    if value < metadata.get("minimum", value):
        raise ProtocolError(
            f"{_quoted(value)} is too small", path=path, mend=f"give at least {metadata['minimum']}"
        )
    if value > metadata.get("maximum", value):
        raise ProtocolError(
            f"{_quoted(value)} is too large", path=path, mend=f"give at most {metadata['maximum']}"
        )
    limit = metadata.get("exclusiveMaximum")
    if limit is not None and value >= limit:
        raise ProtocolError(
            f"{_quoted(value)} is too large", path=path, mend=f"give less than {limit}"
        )


# --- Files ----------------------------------------------------------------------------------------


def read_scenarios(file: str | os.PathLike[str] | BinaryIO) -> Iterator[tuple[int, Scenario]]:
    """The scenarios of a file, one a line, each with its line number, counted from 1.

    Blank lines are skipped. The file is read as far as the iterator is, and closed at its end if it
    was opened here.

    Args:
        file: A path, or a file opened for reading bytes.

    Raises:
        ProtocolError: The file cannot be read, or a line is no scenario; the text starts with the
            file's name and, for a line, its number.
    """
    name = _name_of(file)
    try:
        with _opened(file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _at_line(line, f"{name}:{number}")
    except OSError as error:
        raise ProtocolError(
            f"cannot be read ({error.strerror or error})",
            path=name,
            mend="give a file of scenarios, one a line",
        ) from None


def _at_line(line: bytes, where: str) -> Scenario:
    try:
        return decode_scenario(line)
    except ProtocolError as error:
        raise error.at(where) from None


def _name_of(file: str | os.PathLike[str] | BinaryIO) -> str:
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file)
    return str(getattr(file, "name", "input"))


def _opened(
    file: str | os.PathLike[str] | BinaryIO,
) -> contextlib.AbstractContextManager[BinaryIO]:
    if isinstance(file, (str, os.PathLike)):
        return open(file, "rb")  # noqa: PTH123 - a plain string is welcome too
    return contextlib.nullcontext(file)


# --- The schema -----------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of scenarios and traces, derived from the classes.

    ``$defs`` holds ``Scenario`` and ``Trace``; the document as a whole accepts either. A schema
    cannot say everything: the reader also refuses ``3.0`` for ``3``, duplicate keys, and what the
    classes' validators find by comparing fields.
    """
    classes = _classes(Scenario) | _classes(Trace)
    _, components = msgspec.json.schema_components((Scenario, Trace), ref_template="#/$defs/{name}")
    for name, schema in components.items():
        _complete(schema, classes[name])
    _bound_integers(components)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mustfit scenarios and traces",
        "description": "One line of a scenario file, or one line of the answer to it.",
        "anyOf": [{"$ref": "#/$defs/Scenario"}, {"$ref": "#/$defs/Trace"}],
        "$defs": components,
    }


def _classes(cls: type) -> dict[str, type]:
    """A class and all that its fields hold, by name."""
    found = {cls.__name__: cls}
    for hint in _hints(cls).values():
        kind, _ = _required(hint)
        for inner in (kind, *typing.get_args(kind)):
            if attrs.has(inner):
                found |= _classes(inner)
    return found


def _complete(schema: dict[str, Any], cls: type) -> None:
    """Adds to a class's schema what msgspec leaves out."""
    schema["description"], described = _documentation(cls)
    schema["additionalProperties"] = False
    for field in attrs.fields(cls):
        prop = schema["properties"][field.name]
        # The description first: it is what a person looks for.
        prop = {"description": described[field.name]} | prop
        schema["properties"][field.name] = prop
        if "default" in prop:
            # An empty tuple is a list to JSON.
            prop["default"] = json.loads(json.dumps(prop["default"]))
        for branch in (prop, *prop.get("anyOf", ())):
            _bound(branch, field.metadata)


def _bound(schema: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    kind = schema.get("type")
    if kind in {"integer", "number"}:
        bounds = ("minimum", "maximum", "exclusiveMaximum")
        schema.update({name: metadata[name] for name in bounds if name in metadata})
    elif metadata.get("not_empty"):
        schema.update({"string": {"minLength": 1}, "array": {"minItems": 1}}.get(str(kind), {}))


def _bound_integers(schema: object) -> None:
    """Says of every whole number that it has 64 bits."""
    if isinstance(schema, list):
        for item in schema:
            _bound_integers(item)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema.setdefault("minimum", _INT64_MIN)
            schema.setdefault("maximum", _INT64_MAX)
        for item in schema.values():
            _bound_integers(item)


_ATTRIBUTE = re.compile(r"    (?P<name>\w+): (?P<text>.*)")


def _documentation(cls: type) -> tuple[str, dict[str, str]]:
    """What a class's docstring says of the class, and of each attribute, as running text."""
    head, _, rest = (cls.__doc__ or "").partition("\n    Attributes:\n")
    described: dict[str, list[str]] = {}
    for line in _dedented(rest):
        if found := _ATTRIBUTE.match(line):
            described[found["name"]] = lines = [found["text"]]
        elif line.startswith("     "):
            lines.append(line.strip())
        else:
            break
    return " ".join(head.split()), {name: " ".join(text) for name, text in described.items()}


def _dedented(section: str) -> Iterator[str]:
    for line in section.splitlines():
        yield line[4:]
