"""Lines of JSON: what is written can be read, and nothing else can."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import statistics
import timeit
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import jsonschema
import pytest

from mustfit_checks import generate, protocol
from mustfit_checks.protocol import (
    OUT_OF_SCOPE,
    ProtocolError,
    decode_scenario,
    decode_trace,
    encode,
    json_schema,
    read_scenarios,
)
from mustfit_spec import (
    REVISIONS,
    Config,
    NewRequest,
    Operation,
    Scenario,
    StepTrace,
    Trace,
    TraceError,
    run,
)

# --- Samples: a value for each field of each class, found from the annotations --------------------

#: Values that the classes' validators want; every other one is made up from the field's type.
GIVEN: dict[tuple[type, str], Any] = {
    (Config, "num_gpu_blocks"): 64,
    (Config, "max_model_len"): 40,
    (Config, "max_num_seqs"): 9,
    (Config, "max_num_batched_tokens"): 50,
    (Config, "max_num_active_seqs"): 8,
    (Config, "long_prefill_token_threshold"): 7,
    (Config, "watermark"): 0.125,
    (NewRequest, "max_tokens"): 2,
    (NewRequest, "min_tokens"): 1,
    (Scenario, "operations"): (
        Operation(op="add", request_id="r0"),
        Operation(op="abort", request_id="r1"),
        Operation(op="reset_prefix_cache", reset_running_requests=True),
        Operation(op="step"),
    ),
}


def sample(cls: Any, counter: Iterator[int], **given: Any) -> Any:
    """An instance none of whose fields has its default."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in attrs.fields(cls):
        if field.name in given:
            values[field.name] = given[field.name]
        elif (cls, field.name) in GIVEN:
            values[field.name] = GIVEN[cls, field.name]
        else:
            values[field.name] = sample_of(hints[field.name], field.default, counter)
        assert values[field.name] != field.default, f"{cls.__name__}.{field.name}"
    return cls(**values)


def sample_of(hint: Any, default: Any, counter: Iterator[int]) -> Any:  # noqa: PLR0911
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return sample_of(args[0], default, counter)
    if origin is tuple and args[0] is NewRequest:
        return tuple(sample(NewRequest, counter, request_id=f"r{i}") for i in range(2))
    if origin is tuple:
        return (sample_of(args[0], None, counter), sample_of(args[0], None, counter))
    if origin is dict:
        return {f"k-ü:{next(counter)}": sample_of(args[1], None, counter) for _ in range(2)}
    if origin is Literal:
        return next(choice for choice in args if choice != default)
    if attrs.has(hint):
        return sample(hint, counter)
    made: dict[Any, Callable[[], Any]] = {
        bool: lambda: default is False,
        int: lambda: next(counter),
        str: lambda: f'"\\\n ü:😀{next(counter)}',
    }
    return made[hint]()


def sample_scenario() -> Scenario:
    made: Scenario = sample(Scenario, itertools.count(10))
    return made


def sample_trace() -> Trace:
    made: Trace = sample(Trace, itertools.count(10))
    return made


def assert_same(one: Any, other: Any, path: str = "$") -> set[tuple[type, str]]:
    """Field by field, types too; the fields that were compared at a value of their own."""
    assert type(one) is type(other), path
    seen: set[tuple[type, str]] = set()
    if attrs.has(type(one)):
        for field in attrs.fields(type(one)):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if mine != field.default:
                seen.add((type(one), field.name))
            seen |= assert_same(mine, theirs, f"{path}.{field.name}")
    elif isinstance(one, tuple):
        assert len(one) == len(other), path
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            seen |= assert_same(mine, theirs, f"{path}[{index}]")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            seen |= assert_same(one[key], other[key], f"{path}[{key!r}]")
    else:
        assert one == other, path
    return seen


def fields_of_classes(*classes: type) -> set[tuple[type, str]]:
    return {(cls, field.name) for cls in classes for field in attrs.fields(cls)}


# --- Round trips ----------------------------------------------------------------------------------


def test_every_field_of_a_scenario_survives() -> None:
    scenario = sample_scenario()
    seen = assert_same(scenario, decode_scenario(encode(scenario)))
    assert seen == fields_of_classes(Scenario, Config, NewRequest, Operation)


def test_every_field_of_a_trace_survives() -> None:
    trace = sample_trace()
    seen = assert_same(trace, decode_trace(encode(trace)))
    assert seen == fields_of_classes(Trace, StepTrace, TraceError)


@pytest.mark.parametrize("careful", [False, True])
def test_generated_scenarios_and_their_traces_survive(
    careful: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if careful:
        monkeypatch.setattr(protocol, "_decode_if_in_order", lambda *_: None)
    for scheduler in REVISIONS.values():
        for scenario in generate.scenarios(seed=5, count=10, lacks=scheduler.lacks):
            trace = run(scenario, scheduler(scenario.config))
            assert_same(scenario, decode_scenario(encode(scenario)))
            assert_same(trace, decode_trace(encode(trace).decode()))


def test_defaults_are_written_and_none_is_not() -> None:
    config = Config(
        num_gpu_blocks=2, block_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1
    )
    line = encode(Scenario(scenario_id="", config=config, requests=(), operations=()))
    written = json.loads(line)["config"]
    nones = {f.name for f in attrs.fields(Config) if getattr(config, f.name) is None}
    assert nones
    assert list(written) == [f.name for f in attrs.fields(Config) if f.name not in nones]
    assert b"null" not in encode(attrs.evolve(sample_trace(), error=None, release=None))


def test_equal_objects_give_equal_lines() -> None:
    trace = sample_trace()
    turned = tuple(
        attrs.evolve(step, num_blocks=dict(reversed((step.num_blocks or {}).items())))
        for step in trace.steps
    )
    assert encode(attrs.evolve(trace, steps=turned)) == encode(trace)
    assert b"\n" not in encode(trace)


def test_nothing_is_written_that_is_not_read() -> None:
    with pytest.raises(ProtocolError, match=r"\$\.error\.step: a whole number of 20 digits"):
        encode(attrs.evolve(sample_trace(), error=TraceError(step=10**19)))
    with pytest.raises(ProtocolError, match=r"\$\.release: half of a surrogate pair"):
        encode(attrs.evolve(sample_trace(), release="\ud800"))
    for edge in (2**63 - 1, -(2**63)):
        request = NewRequest(request_id="19" * 19, prompt_token_ids=(edge,), sampled_token_ids=(1,))
        scenario = attrs.evolve(sample_scenario(), requests=(request,), operations=())
        assert decode_scenario(encode(scenario)) == scenario


def test_a_whole_number_is_a_number() -> None:
    data = json.loads(encode(sample_scenario()))
    data["config"]["watermark"] = 0
    watermark = decode_scenario(json.dumps(data)).config.watermark
    assert type(watermark) is float


# --- Refusals -------------------------------------------------------------------------------------


def line_with(*changes: tuple[str, str]) -> str:
    text = encode(sample_scenario()).decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def replaced(**fields: Any) -> str:
    return json.dumps(json.loads(line_with()) | fields)


REFUSED: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "$: not JSON: Expecting value at column 1; write one JSON object a line"),
    "not utf-8": (b'{"\xff"', "$: not UTF-8: byte 0xff at offset 2; write the line in UTF-8"),
    "utf-16": (line_with().encode("utf-16"), "$: not UTF-8: byte 0xff at offset 0; "),
    "byte order mark": (b"\xef\xbb\xbf{}", "$: not JSON: Unexpected UTF-8 BOM"),
    "cut off": (line_with()[:-1], "$: not JSON: Expecting ',' delimiter at column "),
    "two objects": ("{} {}", "$: not JSON: Extra data at column 4; "),
    "list": ("[]", "$: expected an object, not a list"),
    "null": ("null", "$: expected an object, not null"),
    "deep": ("[" * 200_000, "$: nested too deeply; "),
    "deep objects": ('{"config":' * 200_000, "$: nested too deeply; "),
    "NaN": (
        line_with(('"watermark":0.125', '"watermark":NaN')),
        "$.config.watermark: NaN is not a JSON number; give a finite number",
    ),
    "Infinity": (
        line_with(('"watermark":0.125', '"watermark":-Infinity')),
        "$.config.watermark: -Infinity is not a JSON number; give a finite number",
    ),
    "infinite": (
        line_with(('"watermark":0.125', '"watermark":1e999')),
        "$.config.watermark: a number too large for a double; give a finite number",
    ),
    "duplicate": (
        line_with(('"policy":', '"policy":"fcfs","policy":')),
        '$.config.policy: the key "policy" is there more than once; keep one of them',
    ),
    "duplicate with a space": (
        line_with(('"policy":', '"policy" : "fcfs", "policy" :')),
        '$.config.policy: the key "policy" is there more than once; keep one of them',
    ),
    "duplicate, written otherwise": (
        line_with(('"policy":', '"p\\u006flicy":"fcfs","policy":')),
        '$.config.policy: the key "policy" is there more than once; keep one of them',
    ),
    "duplicate in a list": (
        line_with(('"priority":', '"priority":1,"priority":')),
        '$.requests[0].priority: the key "priority" is there more than once; keep one of them',
    ),
    "misspelt": (
        line_with(('"policy":', '"polcy":')),
        '$.config.polcy: unknown field "polcy"; did you mean "policy"?',
    ),
    "unknown": (
        line_with(('"op":"step"', '"op":"step","zzz":1')),
        '$.operations[3].zzz: unknown field "zzz"; known are op, request_id, reset_',
    ),
    "unknown, with a strange name": (
        line_with(('"op":"step"', '"op":"step","a\\nb.c":1')),
        '$.operations[3]["a\\nb.c"]: unknown field "a\\nb.c"; known are op',
    ),
    "out of scope": (
        line_with(('"policy":', '"speculative_config":{},"policy":')),
        "$.config.speculative_config: speculative_config is not in scope (see docs/scope.md); ",
    ),
    "a request's, out of scope": (
        line_with(('"priority":', '"lora_request":null,"priority":')),
        "$.requests[0].lora_request: lora_request is not in scope (see docs/scope.md); ",
    ),
    "missing": (
        line_with(('"block_size":', '"block_size_":')),
        '$.config.block_size_: unknown field "block_size_"; did you mean "block_size"?',
    ),
    "missing field": ('{"scenario_id":"a"}', "$.config: missing; add the field, an object"),
    "missing choice": (
        line_with(('{"op":"step",', "{")),
        '$.operations[3].op: missing; add the field, one of "add", "step", "abort", "reset_prefix',
    ),
    "quoted number": (
        line_with(('"prompt_token_ids":[', '"prompt_token_ids":[1,2,"3",')),
        '$.requests[0].prompt_token_ids[2]: expected a whole number, not the string "3"; write it',
    ),
    "true for a number": (
        line_with(('"num_gpu_blocks":64', '"num_gpu_blocks":true')),
        "$.config.num_gpu_blocks: expected a whole number, not true",
    ),
    "one for true": (
        line_with(('"enable_prefix_caching":false', '"enable_prefix_caching":1')),
        "$.config.enable_prefix_caching: expected true or false, not 1",
    ),
    "3.0": (
        line_with(('"max_num_seqs":9', '"max_num_seqs":3.0')),
        "$.config.max_num_seqs: expected a whole number, not 3.0; write it as 3",
    ),
    "string for an object": (
        '{"scenario_id":"a","config":"b"}',
        '$.config: expected an object, not the string "b"',
    ),
    "object for a list": (
        replaced(requests={}),
        "$.requests: expected a list, not an object",
    ),
    "no prompt": (
        replaced(requests=[{"request_id": "a", "prompt_token_ids": []}]),
        "$.requests[0].prompt_token_ids: must not be empty; give at least one element",
    ),
    "beyond 64 bits": (
        line_with(('"num_gpu_blocks":64', '"num_gpu_blocks":9223372036854775808')),
        "$.config.num_gpu_blocks: a whole number of 19 digits is beyond 64 bits; keep to -922",
    ),
    "far beyond 64 bits": (
        line_with(('"num_gpu_blocks":64', '"num_gpu_blocks":' + "9" * 100_000)),
        "$.config.num_gpu_blocks: a whole number of 100000 digits is beyond 64 bits; ",
    ),
    "too small": (
        line_with(('"num_gpu_blocks":64', '"num_gpu_blocks":1')),
        "$.config.num_gpu_blocks: 1 is too small; give at least 2",
    ),
    "beyond mustfit's limit": (
        line_with(('"num_gpu_blocks":64', '"num_gpu_blocks":1000001')),
        "$.config.num_gpu_blocks: 1000001 is too large; give at most 1000000",
    ),
    "too large": (
        line_with(('"watermark":0.125', '"watermark":1.0')),
        "$.config.watermark: 1.0 is too large; give less than 1.0",
    ),
    "no name": (
        line_with(('"request_id":"r1"', '"request_id":""')),
        "$.requests[1].request_id: must not be empty; give it a name",
    ),
    "no such choice": (
        line_with(('"policy":"priority"', '"policy":"prio"')),
        '$.config.policy: the string "prio" is not one of "fcfs", "priority"; did you mean "prio',
    ),
    "fields at odds": (
        line_with(('"max_num_seqs":9', '"max_num_seqs":51')),
        "$.config: max_num_batched_tokens (50) must be at least max_num_seqs (51)",
    ),
    "operation at odds": (
        line_with(('"op":"step"', '"op":"abort"')),
        "$.operations[3]: the operation 'abort' needs a request_id",
    ),
    "scenario at odds": (
        line_with(('"request_id":"r1"', '"request_id":"r0"')),
        "$: two requests are called 'r0'",
    ),
    "half a surrogate pair": (
        line_with(('"request_id":"r1"', '"request_id":"\\ud83d"')),
        "$.requests[1].request_id: half of a surrogate pair; write the whole pair",
    ),
    "half a surrogate pair, unescaped": ('{"\ud83d":1}', '$["\\ud83d"]: half of a surrogate pair'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_and_remedy(name: str) -> None:
    line, message = REFUSED[name]
    with pytest.raises(ProtocolError) as caught:
        decode_scenario(line)
    text = str(caught.value)
    assert text.startswith(message)
    assert text.isprintable()
    assert text.startswith(f"{caught.value.path}: ")
    kinds = {"not UTF-8": "not-utf8", "not JSON": "not-json"}
    expected = next((k for start, k in kinds.items() if text.startswith(f"$: {start}")), "invalid")
    assert caught.value.kind == expected


def test_paths_in_a_trace() -> None:
    text = encode(sample_trace()).decode()
    data = json.loads(text)
    key = next(iter(data["steps"][1]["block_ids"]))
    data["steps"][1]["block_ids"][key][1] = "x"
    with pytest.raises(ProtocolError) as caught:
        decode_trace(json.dumps(data))
    assert str(caught.value) == (
        f'$.steps[1].block_ids[{json.dumps(key)}][1]: expected a whole number, not the string "x"'
    )


def test_a_duplicate_in_a_map_of_a_trace() -> None:
    line = '{"scenario_id":"a:b","steps":[{"num_scheduled_tokens":{"r":1,"r":2},"preempted":[],'
    line += '"finished":[],"running":[],"waiting":[]}]}'
    with pytest.raises(ProtocolError, match=r"^\$\.steps\[0\]\.num_scheduled_tokens\.r: the key"):
        decode_trace(line)
    assert decode_trace(line.replace('"r":2', '"s":2')).scenario_id == "a:b"


@pytest.mark.parametrize(
    "name",
    [
        "speculative_config",
        "kv_transfer_config",
        "kv_connector",
        "lora_config",
        "lora_request",
        "sliding_window",
        "mamba_block_size",
        "mm_features",
        "multimodal_config",
        "structured_outputs",
        "structured_output_request",
        "pooling_params",
        "async_scheduling",
        "pipeline_parallel_size",
        "prompt_embeds",
        "resumable",
        "streaming_queue",
        "prefill_schedule_interval",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "scheduler_cls",
        "disable_hybrid_kv_cache_manager",
        "load_kv_async",
        "kv_offloading_size",
        "num_external_computed_tokens",
        "attention_chunk_size",
        "is_multimodal_model",
        "disable_chunked_mm_input",
        "limit_mm_per_prompt",
        "encoder_cache_size",
        "enable_lora",
        "max_loras",
        "guided_json",
        "structural_tag",
        "runner_type",
        "enable_prompt_embeds",
        "num_speculative_tokens",
        "spec_token_ids",
        "num_draft_tokens",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "cp_kv_cache_interleave_size",
    ],
)
def test_what_is_out_of_scope_is_refused_by_name(name: str) -> None:
    for place in (("config",), ("requests", 1), ()):
        data = json.loads(encode(sample_scenario()))
        inner = data
        for key in place:
            inner = inner[key]
        inner[name] = None
        with pytest.raises(ProtocolError, match=rf"{name} is not in scope \(see docs/scope.md\)"):
            decode_scenario(json.dumps(data))


def test_nothing_that_there_is_is_out_of_scope() -> None:
    names = {name for _, name in fields_of_classes(Scenario, Config, NewRequest, Operation)}
    assert not [name for name in names if protocol._OUT_OF_SCOPE.fullmatch(name)]
    assert list(OUT_OF_SCOPE) == sorted(set(OUT_OF_SCOPE))


# --- The schema -----------------------------------------------------------------------------------


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json_schema()
    return jsonschema.Draft202012Validator({**schema, "anyOf": [{"$ref": f"#/$defs/{name}"}]})


def test_the_schema_is_one_and_is_documented() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    classes = (Scenario, Config, NewRequest, Operation, Trace, StepTrace, TraceError)
    assert set(schema["$defs"]) == {cls.__name__ for cls in classes}
    for cls in classes:
        definition = schema["$defs"][cls.__name__]
        assert definition["description"].endswith(".")
        assert definition["additionalProperties"] is False
        for field in attrs.fields(cls):
            prop = definition["properties"][field.name]
            assert prop["description"]
            assert "  " not in prop["description"]
            required = field.default is attrs.NOTHING
            assert (field.name in definition["required"]) == required
            if not required:
                default = list(field.default) if field.default == () else field.default
                assert prop["default"] == default


def test_a_pool_has_a_limit_and_may_reach_it() -> None:
    config = sample_scenario().config
    assert attrs.evolve(config, num_gpu_blocks=1_000_000).num_gpu_blocks == 1_000_000
    with pytest.raises(ValueError, match=r"'num_gpu_blocks' must be <= 1000000: 1000001"):
        attrs.evolve(config, num_gpu_blocks=1_000_001)
    with pytest.raises(ValueError, match=r"'num_gpu_blocks' must be >= 2: 1"):
        attrs.evolve(config, num_gpu_blocks=1)


def test_the_schema_has_the_bounds_of_the_classes() -> None:
    config = json_schema()["$defs"]["Config"]["properties"]
    assert config["num_gpu_blocks"]["minimum"] == 2
    assert config["num_gpu_blocks"]["maximum"] == 1_000_000
    assert config["block_size"]["maximum"] == 2**63 - 1
    assert config["max_num_active_seqs"]["anyOf"][0]["minimum"] == 1
    assert config["watermark"]["minimum"] == 0.0
    assert config["watermark"]["exclusiveMaximum"] == 1.0
    assert sorted(config["policy"]["enum"]) == ["fcfs", "priority"]
    request = json_schema()["$defs"]["NewRequest"]["properties"]
    assert request["request_id"]["minLength"] == 1
    assert request["prompt_token_ids"]["minItems"] == 1
    assert "minItems" not in request["stop_token_ids"]


def test_the_whole_schema_accepts_either() -> None:
    either = jsonschema.Draft202012Validator(json_schema())
    assert either.is_valid(json.loads(encode(sample_scenario())))
    assert either.is_valid(json.loads(encode(sample_trace())))
    assert not either.is_valid({})


#: What stands for a value of the wrong type. Not 3.0: to JSON Schema, that is an integer.
WRONG: tuple[Any, ...] = ("3", "", True, None, 3.5, -1, 0, 1, 2**63, -(2**63) - 1, [], {}, [[]])


def mutations(data: Any) -> Iterator[tuple[str, Any]]:
    """The data with one thing changed: a field added or missing, a value replaced."""
    for path in places(data):
        value = at(data, path)
        if isinstance(value, dict):
            yield f"{path} + unknown", changed(data, path, {**value, "unknown": 1})
            for key in value:
                rest = {k: v for k, v in value.items() if k != key}
                yield f"{path} - {key}", changed(data, path, rest)
        for wrong in WRONG:
            yield f"{path} = {wrong!r}", changed(data, path, wrong)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(data)
    at(result, path[:-1])[path[-1]] = value
    return result


def refusal(decode: Callable[[str], object], data: Any) -> str | None:
    try:
        decode(json.dumps(data))
    except ProtocolError as error:
        return str(error)
    return None


#: What only the classes' validators can see, since it compares fields.
BEYOND_THE_SCHEMA = (
    "must be at least max_",
    "must be at most max_",
    "takes no",
    "needs a request_id",
    "is more than",
    "are called",
    "names ",
    "adds ",
)


@pytest.mark.parametrize(
    ("name", "decode", "line", "least"),
    [
        ("Scenario", decode_scenario, encode(sample_scenario()), 700),
        ("Trace", decode_trace, encode(sample_trace()), 700),
    ],
)
def test_schema_and_decoder_agree_on_every_mutation(
    name: str, decode: Callable[[str], object], line: bytes, least: int
) -> None:
    schema = validator(name)
    data = json.loads(line)
    assert schema.is_valid(data)
    refused = 0
    for what, mutant in mutations(data):
        message = refusal(decode, mutant)
        if schema.is_valid(mutant):
            assert message is None or any(s in message for s in BEYOND_THE_SCHEMA), (what, message)
        else:
            refused += 1
            assert message is not None, what
    assert refused > least


@pytest.mark.parametrize(
    ("decode", "line"),
    [(decode_scenario, encode(sample_scenario())), (decode_trace, encode(sample_trace()))],
)
def test_both_ways_of_reading_agree(
    decode: Callable[[str], object], line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants = [mutant for _, mutant in mutations(json.loads(line))]
    quick = [refusal(decode, mutant) for mutant in mutants]
    monkeypatch.setattr(protocol, "_decode_if_in_order", lambda *_: None)
    assert [refusal(decode, mutant) for mutant in mutants] == quick


# --- Files ----------------------------------------------------------------------------------------


def test_read_scenarios(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    line = encode(sample_scenario())
    file.write_bytes(b"\n" + line + b"\r\n  \n" + line)
    assert list(read_scenarios(file)) == [(2, sample_scenario()), (4, sample_scenario())]
    assert list(read_scenarios(str(file))) == list(read_scenarios(file))
    assert list(read_scenarios(io.BytesIO(line))) == [(1, sample_scenario())]


def test_read_scenarios_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(encode(sample_scenario()) + b"\n\n{}\n")
    scenarios = read_scenarios(file)
    next(scenarios)
    with pytest.raises(ProtocolError) as caught:
        next(scenarios)
    assert str(caught.value) == f"{file}:3: $.scenario_id: missing; add the field, a string"
    assert caught.value.path == "$.scenario_id"


def test_read_scenarios_closes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(encode(sample_scenario()) * 1 + b"\n" + encode(sample_scenario()))
    scenarios = read_scenarios(file)
    next(scenarios)
    del scenarios  # a file left open would be a ResourceWarning


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_read_scenarios_of_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        list(read_scenarios(tmp_path / name))


# --- Speed ----------------------------------------------------------------------------------------


def test_a_trace_is_read_quickly() -> None:
    scheduler = list(REVISIONS.values())[-1]
    scenario = next(
        s
        for s in generate.scenarios(seed=1, count=1000, lacks=scheduler.lacks)
        if s.num_steps == 20
    )
    line = encode(run(scenario, scheduler(scenario.config)))

    def seconds(call: Callable[[bytes], object], one: bytes) -> float:
        return timeit.Timer(functools.partial(call, one)).timeit(number=10)

    # In terms of something that takes as long on the same machine, at the same moment.
    for one in (line, line.replace(b'"r0"', b'"req:0"')):
        ratios = [seconds(decode_trace, one) / seconds(json.loads, one) for _ in range(31)]
        assert statistics.median(ratios) < 8
