"""Bad values of every field of both front ends, and what each must say: a table of named cases.

A value is given twice: as protobuf holds it, and as JSON text. NO stands where one of the two
cannot say it: protobuf has types, JSON has no NaN. `test_bad_fields.py` sends all of them. It fails
where a field of the contract, or one that the gateway reads, has no case of a kind that it needs.
"""
# ruff: noqa: UP031 - bodies are JSON, full of braces

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.protos.token_ids import pack_token_ids

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
NO: Any = object()  # cannot be said
INF, NAN = math.inf, math.nan
HUGE = "9" * 4000
LONG = "B" * 70_000  # longer than a chat or a constraint may be
SURROGATE = '"\\ud800"'  # valid JSON, and no text

# The kinds of values.
MISSING, EMPTY = "missing", "empty"
TYPE, RANGE, INFINITE, SIZE = "wrong type", "out of range", "not finite", "huge"
HOSTILE, CLASH, NOT_HERE = "hostile", "contradiction", "not supported"


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How HTTP says a field: a body with %s for the value, and the field's name in errors."""

    path: str
    body: str
    param: str


@dataclass(frozen=True, kw_only=True)
class Value:
    """One bad value."""

    grpc: Any
    json: Any  # JSON text
    allowed: str  # words that both answers have
    code: int = 400


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field with its bad values.

    Attributes:
        grpc: Where it is in the request of a method, "sampling.stop"; empty: HTTP alone has it.
        method: Of gRPC.
        named: What errors over gRPC call it.
        http: How HTTP says it; empty: gRPC alone has it.
        kinds: Kind of values |-> the values.
        fine: Kind of values |-> why none of it is bad.
    """

    grpc: str
    named: str
    http: Sequence[Spelling]
    kinds: Mapping[str, Sequence[Value]]
    fine: Mapping[str, str]
    method: str = "Generate"

    @property
    def name(self) -> str:
        return f"{self.method}.{self.grpc}" if self.grpc else self.http[0].param


BASES = {
    CHAT: '{"messages": [{"role": "user", "content": "BAD"}], %s}',
    TEXT: '{"prompt": "BAD", %s}',
    RESPONSE: '{"input": "BAD", %s}',
    TOKENIZE: '{"prompt": "BAD", %s}',
    DETOKENIZE: '{"tokens": [1], %s}',
}


TOKENIZED = '{"messages": [{"role": "user", "content": "BAD"}], %s}'


def over(path: str, param: str, fields: str = "") -> Spelling:
    """Return how an endpoint says a field beside what it cannot do without."""
    return Spelling(path=path, body=BASES[path] % (fields or f'"{param}": %s'), param=param)


def on(param: str, *paths: str) -> list[Spelling]:
    """Return a field that has the same name on several endpoints."""
    return [over(path, param) for path in paths or (CHAT, TEXT, RESPONSE)]


def whole(path: str, param: str, body: str) -> Spelling:
    """Return how an endpoint says a field of which the body consists."""
    return Spelling(path=path, body=body, param=param)


def field(
    grpc: str,
    http: Sequence[Spelling],
    allowed: str,
    kinds: Mapping[str, Sequence[tuple[Any, ...]]],
    *,
    named: str | None = None,
    fine: Mapping[str, str] | None = None,
    method: str = "Generate",
) -> Field:
    """Return a row of the table; a value is (protobuf, JSON), (..., allowed) or (..., code)."""

    def value(given: tuple[Any, ...]) -> Value:
        rest = given[2:]
        words = next((each for each in rest if isinstance(each, str)), allowed)
        code = next((each for each in rest if isinstance(each, int)), 400)
        return Value(grpc=given[0], json=given[1], allowed=words, code=code)

    return Field(
        grpc=grpc,
        named=grpc if named is None else named,
        http=http,
        kinds={kind: [value(each) for each in values] for kind, values in kinds.items()},
        fine=fine or {},
        method=method,
    )


def only_http(
    param: str, paths: Sequence[str], allowed: str, kinds: Mapping[str, Sequence[str]]
) -> Field:
    """Return a field that gRPC does not have; its values are JSON texts."""
    values = {kind: [(NO, each) for each in texts] for kind, texts in kinds.items()}
    return field("", on(param, *paths), allowed, values)


def only_grpc(
    grpc: str,
    allowed: str,
    kinds: Mapping[str, Sequence[Any]],
    fine: Mapping[str, str] | None = None,
    code: int = 400,
    **options: Any,
) -> Field:
    """Return a field that HTTP does not have."""
    values = {kind: [(each, NO, code) for each in given] for kind, given in kinds.items()}
    return field(grpc, [], allowed, values, fine=fine, **options)


def no_number(*more: str) -> list[tuple[Any, str]]:
    return [(NO, each) for each in ('"1"', "true", "[1]", "{}", *more)]


def no_integer() -> list[tuple[Any, str]]:
    return no_number("0.5", "1e3")


def below_and_above(most: int, least: int = 0) -> list[tuple[Any, str]]:
    """Values that neither an unsigned integer of protobuf holds."""
    return [(NO, str(least - 1)), (NO, str(most + 1))]


NO_SWITCH = {TYPE: [(NO, each) for each in ("0", "1", '"true"', "[]", "{}")]}
UINT32, UINT64 = 2**32 - 1, 2**64 - 1
NOT_FINITE = [(INF, "1e999"), (-INF, "-1e999"), (NAN, NO)]
NO_INFINITE_INTEGER = {INFINITE: [(NO, "1e999"), (NO, "-1e999")]}
HUGE_NUMBERS = [(NO, HUGE), (NO, f"-{HUGE}")]
MANY = [(3e38, "3e38"), (-3e38, "-3e38"), *HUGE_NUMBERS]


def number(name: str, http: Sequence[Spelling], allowed: str, *bad: float) -> Field:
    """Return a number of SamplingParams; `bad` are out of its range."""
    kinds = {
        TYPE: no_number(),
        RANGE: [(each, repr(each)) for each in bad],
        INFINITE: NOT_FINITE,
        SIZE: MANY,
    }
    return field(f"sampling.{name}", http, allowed, kinds)


def integer(
    name: str,
    http: Sequence[Spelling],
    low: int,
    high: int,
    *,
    most: int = UINT32,
) -> Field:
    """Return an integer of SamplingParams; what protobuf holds and is out of range, too."""
    said = [(each, str(each)) for each in (low - 1, high + 1) if 0 <= each <= most]
    kinds = {
        TYPE: no_integer(),
        RANGE: [*said, *below_and_above(most)],
        **NO_INFINITE_INTEGER,
        SIZE: HUGE_NUMBERS if high == most else [*HUGE_NUMBERS, (most, str(most))],
    }
    return field(f"sampling.{name}", http, f"{low} to {high}", kinds)


MAX_TOKENS = [
    *on("max_tokens", CHAT, TEXT),
    over(CHAT, "max_completion_tokens"),
    over(RESPONSE, "max_output_tokens"),
]
LOGPROBS = [
    over(CHAT, "top_logprobs", '"logprobs": true, "top_logprobs": %s'),
    over(TEXT, "logprobs"),
    over(
        RESPONSE,
        "top_logprobs",
        '"include": ["message.output_text.logprobs"], "top_logprobs": %s',
    ),
]
SAMPLING = [
    number("temperature", on("temperature"), "0 for greedy, or 0.001 to 1000", -0.1, 1e-4, 1001.0),
    number("top_p", on("top_p"), "above 0, up to 1", 0.0, -1.0, 1.01),
    number("min_p", on("min_p"), "0 to 1", -0.1, 1.1),
    number("repetition_penalty", on("repetition_penalty"), "0.001 to 1000", 0.0, -1.0, 1e-4, 1e4),
    number("presence_penalty", on("presence_penalty", CHAT, TEXT), "-2 to 2", -2.1, 2.1),
    number("frequency_penalty", on("frequency_penalty", CHAT, TEXT), "-2 to 2", -2.1, 2.1),
    field(
        "sampling.top_k",
        on("top_k"),
        f"-1 to {UINT32}",
        {
            TYPE: no_integer(),
            RANGE: [(NO, "-2"), (NO, str(UINT32 + 1))],
            **NO_INFINITE_INTEGER,
            SIZE: HUGE_NUMBERS,
        },
    ),
    field(
        "sampling.seed",
        on("seed"),
        f"{-(2**63)} to {UINT64}",
        {
            TYPE: no_integer(),
            RANGE: [(NO, str(-(2**63) - 1)), (NO, str(UINT64 + 1))],
            **NO_INFINITE_INTEGER,
            SIZE: HUGE_NUMBERS,
        },
    ),
    integer("max_tokens", MAX_TOKENS, 1, UINT32),
    field(
        "sampling.min_tokens",
        on("min_tokens"),
        f"0 to {UINT32}",
        {
            TYPE: no_integer(),
            RANGE: below_and_above(UINT32),
            **NO_INFINITE_INTEGER,
            SIZE: [*HUGE_NUMBERS, (UINT32, str(UINT32), "an answer may have here")],
            CLASH: [(600, "600", "an answer may have here")],
        },
    ),
    integer("n", on("n", CHAT, TEXT), 1, 64),
    integer("logprobs", LOGPROBS, 0, 20),
    field(
        "sampling.stop",
        on("stop", CHAT, TEXT),
        "1 to 1024 characters",
        {
            TYPE: [(NO, each, "texts") for each in ("5", "true", '{"a": 1}')]
            + [(NO, each, "a text") for each in ("[5]", '["a", null]')],
            EMPTY: [([""], '""'), (["a", ""], '["a", ""]')],
            RANGE: [(["a"] * 17, json.dumps(["a"] * 17), "at most 16")],
            SIZE: [(["x" * 1025], json.dumps("x" * 1025)), ([LONG], json.dumps(LONG))],
            HOSTILE: [(NO, SURROGATE, "surrogates")],
        },
    ),
    field(
        "sampling.stop_token_ids",
        on("stop_token_ids"),
        "0 to 399",
        {
            TYPE: [(NO, each, "") for each in ("5", '"a"', "[true]", "[1.5]", '["1"]', "{}")],
            RANGE: [
                ([400], "[400]"),
                ([1, 999], "[1, 999]"),
                (NO, "[-1]", "0 to"),
                (NO, "[4294967296]", "0 to"),
            ],
            SIZE: [([1] * 257, json.dumps([1] * 257), "at most 256"), (NO, f"[{HUGE}]", "0 to")],
        },
    ),
    field("sampling.ignore_eos", on("ignore_eos"), "true or false", NO_SWITCH),
    field("sampling.skip_special_tokens", on("skip_special_tokens"), "true or false", NO_SWITCH),
]

FORMAT = '"response_format": {"type": "json_schema", "json_schema": {"schema": %s}}'
TEXT_FORMAT = '"text": {"format": {"type": "json_schema", "schema": %s}}'
SCHEMAS = [
    over(CHAT, "response_format.json_schema.schema", FORMAT),
    over(RESPONSE, "text.format.schema", TEXT_FORMAT),
    *on("guided_json"),
    *[
        over(path, "structured_outputs.json", '"structured_outputs": {"json": %s}')
        for path in (CHAT, TEXT, RESPONSE)
    ],
]


def structured(kind: str) -> list[Spelling]:
    """Return how vLLM's extensions say a constraint."""
    body = '"structured_outputs": {"%s": %%s}' % kind
    within = [over(path, f"structured_outputs.{kind}", body) for path in (CHAT, TEXT, RESPONSE)]
    return [*on(f"guided_{kind}"), *within]


def schemas(*values: object, allowed: str = "") -> list[tuple[Any, ...]]:
    """Return schemas as a text and as JSON."""
    return [(text := json.dumps(each), text, allowed) for each in values]


def texts(*values: str, allowed: str = "") -> list[tuple[Any, ...]]:
    return [(each, json.dumps(each), allowed) for each in values]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


# Each rule is the next one: whoever calls himself for each comes to the end of his stack.
CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(3000)) + 'a3000: "x"\n'
# Small to send, large to compile
MANY_KEYS = {"properties": {f"key{i}": {"type": "integer"} for i in range(1800)}}
MANY_NAMES = {"properties": {f"p{i}": {} for i in range(4000)}}
MANY_WAYS = {
    "allOf": [
        {"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for i in range(8)]}
        for j in range(8)
    ]
}
BACKTRACKING = " & ".join(f"/(.*{each}.*){{30}}/" for each in "abcdefgh")

CONSTRAINTS = [
    field(
        "sampling.constraint.json_schema",
        SCHEMAS,
        "a JSON schema",
        {
            TYPE: [
                *[(each, each) for each in ("5", "[]")],
                *texts("5", "[]", '"x"', "null", "x", "true false"),
            ],
            EMPTY: texts("", allowed="a JSON schema"),
            RANGE: schemas({"type": "objekt"}, {"not": {}}, {"uniqueItems": True}),
            SIZE: schemas({"const": LONG}, allowed="at most 65536 bytes"),
            HOSTILE: schemas(
                {"$ref": "#"},
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
                {"$ref": "https://example.org/schema.json"},
                {"$ref": "file:///etc/passwd"},
                {"$ref": "#/$defs/nowhere"},
                {"x-guidance": {"whitespace_pattern": ".*"}},
                nested(40),
                MANY_WAYS,
            ),
        },
    ),
    # To find these out takes time: one spelling will do.
    field("sampling.constraint.json_schema", SCHEMAS[:1], "", {HOSTILE: schemas(MANY_KEYS)}),
    field("sampling.constraint.json_schema", SCHEMAS[:1], "", {HOSTILE: schemas(MANY_NAMES)}),
    field("sampling.constraint.grammar", structured("grammar")[:1], "", {HOSTILE: texts(CHAIN)}),
    field(
        "sampling.constraint.json_object",
        [
            over(
                path, "structured_outputs.json_object", '"structured_outputs": {"json_object": %s}'
            )
            for path in (CHAT, TEXT, RESPONSE)
        ],
        "",
        {TYPE: [(NO, each, "true") for each in ("0", "1", '"true"', "[]", "{}")]},
    ),
    field(
        "sampling.constraint.regex",
        structured("regex"),
        "",
        {
            TYPE: [(NO, each, "a text") for each in ("5", "true", "[]", "{}")],
            EMPTY: texts("", allowed="at least one character"),
            RANGE: texts("(", "[", "*", "a{2,1}", "\\p{Nowhere}"),
            SIZE: texts(LONG, allowed="at most 65536 bytes"),
            HOSTILE: [
                *texts("(?=a)b", "(a)\\1", "(?!x)", "[a-z]*" * 2000, "(" * 5000),
                (NO, SURROGATE, "surrogates"),
            ],
        },
    ),
    field(
        "sampling.constraint.choice.texts",
        structured("choice"),
        "",
        {
            TYPE: [(NO, each, "texts") for each in ("5", '"a"', "{}")] + [(NO, "[5]", "a text")],
            EMPTY: [
                ([], "[]", ""),
                ([""], '[""]', "at least one character"),
                (["a", ""], '["a", ""]', "at least one character"),
            ],
            RANGE: [(["x"] * 1001, json.dumps(["x"] * 1001), "1000")],
            SIZE: [([LONG], json.dumps([LONG]), "at most 65536 bytes")],
            HOSTILE: [(NO, f"[{SURROGATE}]", "surrogates")],
        },
        named="sampling.constraint.choice",
    ),
    field(
        "sampling.constraint.grammar",
        structured("grammar"),
        "",
        {
            TYPE: [(NO, each, "a text") for each in ("5", "true", "[]", "{}")],
            EMPTY: texts(""),
            RANGE: texts("hello", "start: nowhere", 'root ::= "x', "start: /(/"),
            SIZE: texts(LONG, allowed="at most 65536 bytes"),
            HOSTILE: [
                *texts(
                    "start: start",
                    "start: start start",
                    '%llguidance {}\nstart: "x"',
                    "start: <[5]>",
                    "start: <|end|>",
                    "start: " + "(" * 5000,
                    f"start: A\nA: {BACKTRACKING}",
                ),
                (NO, SURROGATE, "surrogates"),
            ],
        },
    ),
]


# Prompts. A chat that is too long is refused as a whole, whichever part of it is.

NOT_A_TEXT = [(NO, each) for each in ("5", "true", "[]", "{}")]
TOO_LONG = [(LONG, json.dumps(LONG), "at most 16384")]
PROMPT = whole(TEXT, "prompt", '{"prompt": %s}')


def ids(*token_ids: int) -> tuple[bytes, str]:
    return pack_token_ids(token_ids), json.dumps(token_ids)


def of_message(name: str, body: str) -> list[Spelling]:
    """Return a field of the first message, and how a chat and /tokenize say it."""
    return [
        whole(path, f"messages[0].{name}", '{"messages": [{%s}]}' % body)
        for path in (CHAT, TOKENIZE)
    ]


def chat_text(name: str, *, http: str = "", body: str, **kinds: Sequence[Any]) -> Field:
    """Return a text of a message."""
    texts_of_it = {TYPE: [(NO, "5"), (NO, "true"), (NO, "{}")], SIZE: TOO_LONG}
    path, _, call_field = name.rpartition(".")
    named = "prompt.chat.messages[0]." + (f"tool_calls[0].{call_field}" if path else name)
    fine = {} if EMPTY in kinds else {EMPTY: "it does not exist for the template then"}
    return field(
        f"chat.messages.{name}",
        of_message(http or name, body),
        "",
        {**texts_of_it, **kinds},
        named=named,
        fine=fine,
    )


ROLES = "'system', 'developer', 'user', 'assistant', 'tool', or a role that the model's template"
CALL = '"role": "assistant", "tool_calls": [{"id": %s, "type": "function", "function": %s}]'
PROMPTS = [
    field(
        "text",
        [PROMPT],
        "",
        {
            TYPE: [(NO, "5"), (NO, "true"), (NO, "{}")],
            EMPTY: [("", '""', "at least one character")],
            SIZE: [
                (LONG, json.dumps(LONG), "at most 16384"),
                ("BAD " * 3000, json.dumps("BAD " * 3000), "at most 511"),
            ],
            HOSTILE: [(NO, SURROGATE, "surrogates")],
        },
        named="prompt.text",
    ),
    field(
        "token_ids",
        [PROMPT],
        "",
        {
            TYPE: [(NO, each) for each in ("[1, true]", "[1.5]", '[1, "a"]', "[[[1]]]", "[{}]")],
            EMPTY: [(b"", "[]"), (NO, "[[]]")],
            RANGE: [
                (*ids(1, 400), "0 to 399"),
                (*ids(UINT32), "0 to 399"),
                (NO, "[-1]", "0 to"),
                (NO, "[4294967296]", "0 to"),
                (b"abc", NO, "a multiple of 4 bytes"),
            ],
            SIZE: [(*ids(*[1] * 512), "at most 511"), (*ids(*[1] * 5000), "at most 511")],
        },
        named="prompt.token_ids",
    ),
    field(
        "chat.messages",
        [whole(path, "messages", '{"messages": %s}') for path in (CHAT, TOKENIZE)],
        "",
        {
            TYPE: [(NO, each) for each in ("{}", '"x"', "5", "[5]", "[[]]")],
            EMPTY: [([], "[]", "at least one message")],
            SIZE: [
                (
                    many := [{"role": "user", "content": "BAD"}] * 10_001,
                    json.dumps(many),
                    "at most 10000",
                )
            ],
        },
        named="prompt.chat.messages",
    ),
    chat_text(
        "role",
        body='"role": %s, "content": "BAD"',
        **{
            EMPTY: [("", '""', ROLES)],
            RANGE: [("robot", '"robot"', ROLES), ("User", '"User"', ROLES)],
        },
    ),
    chat_text("content", body='"role": "user", "content": %s'),
    chat_text(
        "reasoning_content", body='"role": "assistant", "content": "BAD", "reasoning_content": %s'
    ),
    chat_text(
        "tool_call_id",
        body='"role": "tool", "content": "BAD", "tool_call_id": %s',
        **{MISSING: [(NO, "null", "a string")], EMPTY: [(NO, '""', "at least one character")]},
    ),
    chat_text("name", body='"role": "user", "content": "BAD", "name": %s'),
    field(
        "chat.messages.tool_calls",
        of_message("tool_calls", '"role": "assistant", "tool_calls": %s'),
        "",
        {
            TYPE: [(NO, each) for each in ('"x"', "5", "{}", "[5]", '[{"type": "code"}]')],
            SIZE: [
                (
                    [{"name": "f", "arguments": "BAD" * 3}] * 2000,
                    json.dumps(
                        [{"id": "c", "function": {"name": "f", "arguments": "BAD" * 3}}] * 2000
                    ),
                    "at most 16384",
                )
            ],
        },
        named="prompt.chat.messages[0].tool_calls",
        fine={EMPTY: "the message has none then"},
    ),
    chat_text(
        "tool_calls.name",
        http="tool_calls[0].function.name",
        body=CALL % ('"c"', '{"name": %s, "arguments": "{}"}'),
        **{MISSING: [(NO, "null", "a string")], EMPTY: [("", '""', "")]},
    ),
    chat_text(
        "tool_calls.id",
        http="tool_calls[0].id",
        body=CALL % ("%s", '{"name": "f", "arguments": "{}"}'),
        **{MISSING: [(NO, "null", "a string")], EMPTY: [(NO, '""', "at least one character")]},
    ),
    chat_text(
        "tool_calls.arguments",
        http="tool_calls[0].function.arguments",
        body=CALL % ('"c"', '{"name": "f", "arguments": %s}'),
        **{MISSING: [(NO, "null", "a string")]},
    ),
    field(
        "chat.tools_json",
        [
            over(CHAT, "tools"),
            over(RESPONSE, "tools"),
            whole(TOKENIZE, "tools", TOKENIZED % '"tools": %s'),
        ],
        "",
        {
            TYPE: [
                ("5", "5", "array"),
                ("{}", "{}", "array"),
                ("[5]", "[5]", "object"),
                ('"x"', '"x"', "array"),
            ],
            HOSTILE: [("[" * 10_000, NO, ""), ("[NaN]", NO, ""), ("[", NO, "")],
        },
        named="prompt.chat.tools_json",
        fine={EMPTY: "there are no tools then"},
    ),
    field(
        "chat.tools_json",
        [over(CHAT, "messages", '"tools": %s')],
        "at most 16384",
        {
            SIZE: [
                (
                    tools := json.dumps(
                        [{"type": "function", "function": {"name": "f", "description": LONG}}]
                    ),
                    tools,
                )
            ]
        },
        named="prompt.chat",
    ),
    field(
        "model",
        [*on("model"), over(TOKENIZE, "model"), over(DETOKENIZE, "model")],
        "",
        {
            TYPE: NOT_A_TEXT,
            RANGE: [("other", '"other"', "'tiny'", 404), ("Tiny", '"Tiny"', "'tiny'", 404)],
            SIZE: [(LONG, json.dumps(LONG), "'tiny'", 404)],
        },
        fine={EMPTY: "there is only one model"},
    ),
]

# The two methods that turn text into tokens and back

TOKENS = [
    field(
        "text",
        [whole(TOKENIZE, "prompt", '{"prompt": %s}')],
        "",
        {
            TYPE: NOT_A_TEXT,
            EMPTY: [("", '""', "at least one character")],
            SIZE: TOO_LONG,
            HOSTILE: [(NO, SURROGATE, "surrogates")],
        },
        named="input.text",
        method="Tokenize",
    ),
    only_grpc(
        "model",
        "'tiny'",
        {RANGE: ["other"], SIZE: [LONG]},
        {EMPTY: "there is only one model"},
        method="Tokenize",
        code=404,
    ),
    only_grpc(
        "model",
        "'tiny'",
        {RANGE: ["other"], SIZE: [LONG]},
        {EMPTY: "there is only one model"},
        method="Detokenize",
        code=404,
    ),
    field(
        "token_ids",
        [whole(DETOKENIZE, "tokens", '{"tokens": %s}')],
        "",
        {
            TYPE: [(NO, each) for each in ("5", '"x"', "[true]", "[1.5]", "{}")],
            RANGE: [
                (*ids(1, 400), "0 to 399"),
                (NO, "[-1]", "0 to"),
                (NO, "[4294967296]", "0 to"),
                (b"abc", NO, "a multiple of 4 bytes"),
            ],
            SIZE: [(*ids(*[1] * 513), "at most 512")],
        },
        method="Detokenize",
        fine={EMPTY: "its text is empty"},
    ),
]

# What HTTP alone has

SWITCH = ("0", "1", '"true"', "[]", "{}")
TOOLS = '"tools": [{"type": "function", "function": {"name": "f"}}], '
FLAT_TOOLS = '"tools": [{"type": "function", "name": "f"}], '


def inside(
    spellings: Sequence[Spelling], allowed: str, kinds: Mapping[str, Sequence[str]]
) -> Field:
    """Return a field of HTTP alone that stands within another one."""
    values = {kind: [(NO, each) for each in texts] for kind, texts in kinds.items()}
    return field("", spellings, allowed, values)


def unsupported(paths: Sequence[str], allowed: str = "", **fields: Sequence[str]) -> list[Field]:
    """Return fields that are known and refused."""
    return [only_http(name, paths, allowed, {NOT_HERE: each}) for name, each in fields.items()]


def of_tool(name: str, body: str) -> list[Spelling]:
    """Return a field of a function as a chat, /tokenize and a response say it."""
    chat = '"tools": [{"type": "function", "function": {%s}}]' % body
    param = f"tools[0].function.{name}"
    return [
        over(CHAT, param, chat),
        whole(TOKENIZE, param, TOKENIZED % chat),
        over(RESPONSE, f"tools[0].{name}", '"tools": [{"type": "function", %s}]' % body),
    ]


def of_item(name: str, body: str) -> list[Spelling]:
    """Return a field of an item of a response's input."""
    return [whole(RESPONSE, f"input[0].{name}", '{"input": [{%s}]}' % body)]


NO_TEXTS = {TYPE: ("5", "true", "[]", "{}")}
NO_OBJECT = {TYPE: ("5", '"x"', "[]", "true")}
HTTP_ONLY = [
    only_http("stream", (CHAT, TEXT, RESPONSE), "true or false", {TYPE: SWITCH}),
    only_http("stream_options", (CHAT, TEXT, RESPONSE), "an object", NO_OBJECT),
    only_http(
        "stream_options",
        (CHAT, TEXT, RESPONSE),
        "absent where stream is not true",
        {CLASH: ["{}", '{"include_obfuscation": false}']},
    ),
    only_http("metadata", (CHAT, TEXT, RESPONSE), "an object", NO_OBJECT),
    only_http("metadata", (CHAT, TEXT, RESPONSE), "surrogates", {HOSTILE: ['{"\\ud800": "a"}']}),
    inside(
        [over(path, "metadata.a", '"metadata": {"a": %s}') for path in (CHAT, TEXT, RESPONSE)],
        "a string",
        {TYPE: ("5", "1e999", "true", "[]", "{}")},
    ),
    inside(
        [
            over(RESPONSE, "metadata.a", '"metadata": {"a": %s}'),
            over(
                RESPONSE,
                "text.format.name",
                '"text": {"format": {"type": "json_schema", "schema": {}, "name": %s}}',
            ),
        ],
        "surrogates",
        {HOSTILE: [SURROGATE]},
    ),
    inside(
        [over(CHAT, "max_completion_tokens", '"max_tokens": 5, "max_completion_tokens": %s')],
        "absent with max_tokens, or equal to it",
        {CLASH: ["6", '"5"']},
    ),
    only_http("text", (TOKENIZE,), "messages, model, prompt", {NOT_HERE: ['"x"']}),
    inside(
        [
            over(
                path,
                "stream_options.include_usage",
                '"stream": true, "stream_options": {"include_usage": %s}',
            )
            for path in (CHAT, TEXT)
        ],
        "true or false",
        {TYPE: SWITCH},
    ),
    inside(
        [
            over(
                path,
                "stream_options.include_obfuscation",
                '"stream_options": {"include_obfuscation": %s}',
            )
            for path in (CHAT, TEXT, RESPONSE)
        ],
        "false",
        {TYPE: SWITCH, NOT_HERE: ["true"]},
    ),
    only_http("logprobs", (CHAT,), "true or false", {TYPE: SWITCH}),
    only_http("top_logprobs", (CHAT,), "0 where logprobs is not true", {CLASH: ["5"]}),
    only_http("top_logprobs", (RESPONSE,), "0 without", {CLASH: ["5"]}),
    only_http("echo", (TEXT,), "true or false", {TYPE: SWITCH}),
    inside([over(TEXT, "logprobs", '"echo": true, "logprobs": %s')], "absent", {CLASH: ["0", "5"]}),
    only_http("best_of", (TEXT,), "n", {TYPE: ['"1"', "[]"], RANGE: ["0", "2", "-1", HUGE]}),
    inside(
        [whole(TEXT, "prompt", '{"prompt": %s}')],
        "",
        {
            TYPE: ["5", "true", "{}", '["a", 5]', '[[1], "a"]'],
            SIZE: [json.dumps(["a"] * 65), json.dumps([[1]] * 65)],
            HOSTILE: ["[" * 900 + "]" * 900],
        },
    ),
    inside([whole(TEXT, "prompt[1]", '{"prompt": %s}')], "", {EMPTY: ['["a", ""]', "[[1], []]"]}),
    inside(
        [
            whole(
                TOKENIZE,
                "tool_choice",
                TOKENIZED % '"tool_choice": %s',
            )
        ],
        "'auto'",
        {TYPE: ["5", "true", "[]"], RANGE: ['"always"', '"required"']},
    ),
    only_http(
        "tool_choice",
        (CHAT, RESPONSE),
        "'auto'",
        {
            TYPE: ["5", "true", "[]"],
            RANGE: ['"always"', '"required"'],
        },
    ),
    inside(
        [
            over(
                CHAT,
                "tool_choice.type",
                TOOLS + '"tool_choice": {"type": %s, "function": {"name": "f"}}',
            ),
            over(
                RESPONSE,
                "tool_choice.type",
                FLAT_TOOLS + '"tool_choice": {"type": %s, "name": "f"}',
            ),
        ],
        "",
        {**NO_TEXTS, RANGE: ['"code"', '""']},
    ),
    inside(
        [
            over(
                CHAT,
                "tool_choice.function",
                TOOLS + '"tool_choice": {"type": "function", "function": %s}',
            )
        ],
        "an object",
        NO_OBJECT,
    ),
    inside(
        [
            over(
                CHAT,
                "tool_choice.function.name",
                TOOLS + '"tool_choice": {"type": "function", "function": {"name": %s}}',
            ),
            over(
                RESPONSE,
                "tool_choice.name",
                FLAT_TOOLS + '"tool_choice": {"type": "function", "name": %s}',
            ),
        ],
        "a string",
        NO_TEXTS,
    ),
    inside(
        [
            over(
                CHAT,
                "tool_choice",
                TOOLS + '"tool_choice": {"type": "function", "function": {"name": %s}}',
            ),
            over(
                RESPONSE,
                "tool_choice",
                FLAT_TOOLS + '"tool_choice": {"type": "function", "name": %s}',
            ),
        ],
        "one of the tools",
        {RANGE: ['"g"', '""'], SIZE: [json.dumps(LONG)]},
    ),
    only_http("parallel_tool_calls", (CHAT, RESPONSE), "true or false", {TYPE: SWITCH}),
    inside(
        [over(path, "tools[0].type", '"tools": [{"type": %s}]') for path in (CHAT, RESPONSE)]
        + [
            whole(
                TOKENIZE,
                "tools[0].type",
                TOKENIZED % '"tools": [{"type": %s}]',
            )
        ],
        "",
        {**NO_TEXTS, RANGE: ['"web_search"', '"custom"', '""']},
    ),
    inside(
        [
            over(CHAT, "tools[0].function", '"tools": [{"type": "function", "function": %s}]'),
            whole(
                TOKENIZE,
                "tools[0].function",
                TOKENIZED % '"tools": [{"type": "function", "function": %s}]',
            ),
        ],
        "an object",
        NO_OBJECT,
    ),
    inside(
        of_tool("name", '"name": %s'),
        "",
        {
            **NO_TEXTS,
            EMPTY: ['""'],
            RANGE: ['"a b"', '"\\n"', '"é"'],
            SIZE: [json.dumps("f" * 129)],
            HOSTILE: [SURROGATE, '"f\\"}"'],
        },
    ),
    inside(
        of_tool("description", '"name": "f", "description": %s'),
        "a string",
        NO_TEXTS,
    ),
    inside(
        of_tool("parameters", '"name": "f", "parameters": %s'),
        "an object",
        NO_OBJECT,
    ),
    inside(
        of_tool("strict", '"name": "f", "strict": %s'),
        "",
        {TYPE: SWITCH},
    ),
    only_http("response_format", (CHAT, TEXT), "an object", NO_OBJECT),
    inside(
        [
            over(path, "response_format.type", '"response_format": {"type": %s}')
            for path in (CHAT, TEXT)
        ]
        + [over(RESPONSE, "text.format.type", '"text": {"format": {"type": %s}}')],
        "",
        {**NO_TEXTS, RANGE: ['"xml"', '"JSON"']},
    ),
    inside(
        [
            over(
                CHAT,
                "response_format.json_schema",
                '"response_format": {"type": "json_schema", "json_schema": %s}',
            )
        ],
        "an object",
        NO_OBJECT,
    ),
    inside(
        [
            over(
                CHAT,
                "response_format.json_schema.schema",
                '"response_format": {"type": "json_schema", "json_schema": %s}',
            )
        ],
        "a JSON schema",
        {MISSING: ["{}", '{"schema": null}']},
    ),
    *[
        inside(
            [
                over(
                    CHAT,
                    f"response_format.json_schema.{name}",
                    FORMAT % ('{}, "%s": %%s' % name),
                ),
                over(
                    RESPONSE,
                    f"text.format.{name}",
                    '"text": {"format": {"type": "json_schema", "schema": {}, "%s": %%s}}' % name,
                ),
            ],
            allowed,
            kinds,
        )
        for name, allowed, kinds in (
            ("name", "a string", NO_TEXTS),
            ("description", "a string", NO_TEXTS),
            ("strict", "true or false", {TYPE: SWITCH}),
        )
    ],
    only_http("structured_outputs", (CHAT, TEXT, RESPONSE), "an object", NO_OBJECT),
    inside(
        [over(CHAT, "guided_choice", '"guided_regex": "a", "guided_choice": %s')],
        "absent",
        {CLASH: ['["a"]']},
    ),
    only_http("text", (RESPONSE,), "an object", NO_OBJECT),
    inside([over(RESPONSE, "text.format", '"text": {"format": %s}')], "an object", NO_OBJECT),
    inside(
        [over(RESPONSE, "text.verbosity", '"text": {"verbosity": %s}')],
        "",
        {NOT_HERE: ['"low"', "5"]},
    ),
    only_http("instructions", (RESPONSE,), "a string", NO_TEXTS),
    only_http(
        "include",
        (RESPONSE,),
        "",
        {TYPE: ["5", '"x"', "{}"], NOT_HERE: ['["reasoning.encrypted_content"]', "[5]"]},
    ),
    inside(
        [whole(RESPONSE, "input", '{"input": %s}')],
        "",
        {
            TYPE: ["5", "true", "{}", "[5]"],
            EMPTY: ['""', "[]"],
            SIZE: [json.dumps(LONG)],
            HOSTILE: ["[" * 900 + "]" * 900, SURROGATE],
        },
    ),
    inside(of_item("type", '"type": %s'), "", {**NO_TEXTS, RANGE: ['"item_reference"', '""']}),
    inside(of_item("role", '"role": %s, "content": "BAD"'), "", {**NO_TEXTS, EMPTY: ['""']}),
    inside(
        of_item("content", '"role": "user", "content": %s'),
        "",
        {TYPE: ["5", "{}", "[5]"], NOT_HERE: ['[{"type": "input_image"}]']},
    ),
    inside(
        of_item("content", '"type": "reasoning", "content": %s'),
        "",
        {TYPE: ["5", '"x"', "{}", "[5]"]},
    ),
    inside(
        of_item("name", '"type": "function_call", "call_id": "c", "arguments": "", "name": %s'),
        "a string",
        {**NO_TEXTS, MISSING: ["null"]},
    ),
    inside(
        of_item(
            "arguments", '"type": "function_call", "call_id": "c", "name": "f", "arguments": %s'
        ),
        "a string",
        {**NO_TEXTS, MISSING: ["null"]},
    ),
    inside(
        of_item("call_id", '"type": "function_call", "name": "f", "arguments": "", "call_id": %s'),
        "a string",
        {**NO_TEXTS, MISSING: ["null"]},
    ),
    inside(
        of_item("call_id", '"type": "function_call_output", "output": "BAD", "call_id": %s'),
        "a string",
        {**NO_TEXTS, MISSING: ["null"]},
    ),
    inside(
        of_item("output", '"type": "function_call_output", "call_id": "c", "output": %s'),
        "",
        {TYPE: ["5", "true", "{}"]},
    ),
    inside(
        of_message(
            "tool_calls[0].type", '"role": "assistant", "tool_calls": [{"id": "c", "type": %s}]'
        ),
        "",
        {**NO_TEXTS, RANGE: ['"custom"']},
    ),
    inside(
        of_message("tool_calls[0].function", CALL % ('"c"', "%s")),
        "an object",
        NO_OBJECT,
    ),
    inside(
        [
            whole(path, "messages[0].content", '{"messages": [{"role": "user", "content": %s}]}')
            for path in (CHAT, TOKENIZE)
        ],
        "",
        {
            TYPE: ['["x"]', '[{"type": "text", "text": 5}]', '[{"type": 5}]'],
            NOT_HERE: [
                '[{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]',
                '[{"type": "text", "text": "x", "y": 1}]',
            ],
        },
    ),
    *[
        inside(
            of_message(name, f'"role": "assistant", "content": "BAD", "{name}": %s'),
            "",
            {NOT_HERE: values},
        )
        for name, values in (
            ("audio", ['{"id": "a"}']),
            ("function_call", ['{"name": "f"}']),
            ("refusal", ['"no"', "5"]),
            ("colour", ['"red"']),
        )
    ],
    *[
        inside(say(f"content[0].{name}", f'"role": "user", "content": [{part}]'), "", kinds)
        for say in (of_message, of_item)
        for name, part, kinds in (
            ("type", '{"type": %s, "text": "BAD"}', {**NO_TEXTS, NOT_HERE: ['"image"', '""']}),
            ("text", '{"type": "text", "text": %s}', NO_TEXTS),
            ("colour", '{"type": "text", "text": "BAD", "colour": %s}', {NOT_HERE: ['"red"']}),
        )
    ],
    only_http("return_token_strs", (TOKENIZE,), "true or false", {TYPE: SWITCH}),
    only_http("add_special_tokens", (TOKENIZE,), "true or false", {TYPE: SWITCH}),
    *[
        inside(
            [
                whole(
                    TOKENIZE,
                    name,
                    '{"messages": [{"role": "user", "content": "BAD"}], "%s": %%s}' % name,
                )
            ],
            "",
            {NOT_HERE: values},
        )
        for name, values in (
            ("add_generation_prompt", ["0", '"no"']),
            ("continue_final_message", ["1", "[]"]),
            ("chat_template", ['"{{ x }}"', '"{% for i in range(10**9) %}{% endfor %}"']),
            ("chat_template_kwargs", ['{"a": 1}']),
        )
    ],
    *unsupported((CHAT, TEXT), logit_bias=['{"1": 5}', "5", "[]"]),
    *unsupported(
        (TEXT,), max_completion_tokens=["5"], max_output_tokens=["5"], suffix=['"x"', "5"]
    ),
    *unsupported(
        (CHAT,),
        audio=['{"voice": "x"}'],
        function_call=['"auto"'],
        functions=['[{"name": "f"}]'],
        max_output_tokens=["5"],
        modalities=['["text", "audio"]', "5"],
        moderation=["{}"],
        prediction=['{"type": "content"}'],
        reasoning_effort=['"high"'],
        service_tier=['"flex"', "5"],
        store=["true", "0"],
        verbosity=['"low"'],
        web_search_options=["{}"],
    ),
    *unsupported(
        (RESPONSE,),
        background=["true", "0"],
        context_management=["[]"],
        conversation=['"c"'],
        max_completion_tokens=["5"],
        max_tokens=["5"],
        max_tool_calls=["1"],
        moderation=["{}"],
        previous_response_id=['"r"'],
        prompt=['{"id": "p"}'],
        reasoning=['{"effort": "high"}'],
        response_format=['{"type": "text"}', "5"],
        service_tier=['"flex"'],
        store=["true"],
        truncation=['"auto"'],
    ),
    *unsupported((CHAT, TEXT, RESPONSE, TOKENIZE, DETOKENIZE), unheard_of=["1", "[]", '"x"']),
    *unsupported(
        (RESPONSE,), presence_penalty=["1"], frequency_penalty=["1"], n=["2"], stop=['"x"']
    ),
]

# What gRPC alone has

GRPC_ONLY = [
    only_grpc(
        "sampling.constraint",
        "one of json_schema",
        {EMPTY: [{}, {"json_object": False}]},
    ),
    only_grpc(
        "sampling.constraint.tool_calls",
        "",
        {
            EMPTY: [""],
            TYPE: ["5", "[]", '"x"', "{}"],
            RANGE: [
                json.dumps({"format": name, "functions": functions} | more)
                for name, functions, more in (
                    ("xml", [{"name": "f"}], {}),
                    ("hermes", [], {}),
                    ("hermes", [{"name": ""}], {}),
                    ("hermes", [{"name": "a b"}], {}),
                    ("hermes", [{"name": "f", "x": 1}], {}),
                    ("hermes", [{"name": "f"}] * 129, {}),
                    ("hermes", [{"name": "f", "parameters": {"type": "objekt"}}], {}),
                    ("hermes", [{"name": "f"}], {"is_parallel": 1}),
                    ("hermes", [{"name": "f"}], {"colour": "red"}),
                )
            ],
            SIZE: [
                json.dumps(
                    {
                        "format": "hermes",
                        "functions": [{"name": "f", "parameters": {"const": LONG}}],
                    }
                )
            ],
            HOSTILE: [
                "[" * 60_000,
                '{"format": NaN}',
                '{"format": "hermes", "functions": [{"name": "f", "parameters": {"$ref": "#"}}]}',
            ],
        },
    ),
    only_grpc(
        "resume.token",
        "the resume_token of the call",
        {EMPTY: [b""], RANGE: [b"x", b"\x01" + b"x" * 68], SIZE: [b"x" * 100_000]},
    ),
    only_grpc(
        "resume.choices.choice",
        "0 to 0, each once",
        {RANGE: [1], SIZE: [UINT32]},
        named="resume.choices[0].choice",
    ),
    only_grpc(
        "resume.choices.token_ids",
        "",
        {RANGE: [b"abc", pack_token_ids([400])], SIZE: [pack_token_ids([1] * 500)]},
        {EMPTY: "the choice has not begun"},
        named="resume.choices[0].token_ids",
    ),
    only_grpc(
        "resume.choices.text_chars",
        "",
        {},
        {
            RANGE: "the text that comes begins behind them, also where there never were so many",
            SIZE: "the same",
        },
    ),
    only_grpc("resume.choices", "0 to 0, each once", {SIZE: [[{"choice": 0}] * 65]}),
    only_grpc(
        "resume.choices.finished",
        "one or more to continue with",
        {CLASH: [True]},
        named="resume.choices",
    ),
]

ALL = [*SAMPLING, *CONSTRAINTS, *PROMPTS, *TOKENS, *HTTP_ONLY, *GRPC_ONLY]


def named_cases() -> Iterator[tuple[str, Field, str]]:
    """Yield each case of the table: its name, the field, and the kind of values."""
    seen: dict[str, int] = {}
    for each in ALL:
        for kind in each.kinds:
            name = f"{each.name}: {kind}"
            seen[name] = seen.get(name, 0) + 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}", each, kind
