"""Responses as servers send them, one for each trap, with what a client has to make of it.

`recorded` ones are shortened from what llama.cpp b11434, vLLM 0.32.0 and SGLang 0.5.23 sent over the wire; the others
are made by hand from the standard or from a peer's bug report, which `trap` names. Expected values are read off the
bytes by eye: which events carry generated tokens, and what the server counted.
"""

from dataclasses import dataclass, field
from typing import Any


def chunked(*parts: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """Each part as one HTTP chunk, and the last chunk."""
    frames = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return frames + b"0\r\n" + trailer + b"\r\n"


def head(kind: str = "text/event-stream", *lines: str, status: str = "200 OK", chunks: bool = True) -> bytes:
    fields = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        *lines,
        *(["Transfer-Encoding: chunked"] if chunks else []),
    ]
    return ("\r\n".join(fields) + "\r\n\r\n").encode()


def sse(*data: str, end: str = "\n") -> list[bytes]:
    return [f"data: {each}{end}{end}".encode() for each in data]


def chat(content: str | None, reason: str | None = None, **more: Any) -> str:
    import json

    choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice], **more})


ROLE = '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":20}}'
DONE = "[DONE]"
STREAM = head()


@dataclass(frozen=True)
class Trap:
    """`expected`: fields of the record; `tokens` is the list of its chunks' tokens."""

    trap: str
    raw: bytes
    ok: bool = True
    expected: dict[str, Any] = field(default_factory=dict)
    closed: bool = False  # the connection ends after these bytes


def plain(*events: str, end: str = "\n") -> bytes:
    return STREAM + chunked(*sse(*events, end=end))


TRAPS = (
    Trap(
        "usage in its own chunk, role first",
        plain(ROLE, chat("Hel"), chat("lo"), chat("", "stop"), USAGE % 2, DONE),
        expected={"text": "Hello", "output_tokens": 2, "prompt_tokens": 9, "tokens": [None, None], "counter": "usage"},
    ),
    Trap(
        "recorded: llama.cpp, role chunk with null content, timings in every chunk, a cached prompt",
        plain(
            '{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"model":"tiny"}',
            '{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"ab"}}],"timings":{"predicted_n":1}}',
            '{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"cd"}}],"timings":{"predicted_n":3}}',
            '{"choices":[{"finish_reason":"length","index":0,"delta":{}}]}',
            '{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":76,"total_tokens":79,'
            '"prompt_tokens_details":{"cached_tokens":24}},"timings":{"cache_n":24,"prompt_n":52,"predicted_n":3,'
            '"draft_n":12,"draft_n_accepted":11}}',
            DONE,
        ),
        expected={
            "text": "abcd",
            "output_tokens": 3,
            "prompt_tokens": 76,
            "cached_tokens": 24,
            "tokens": [1, 2],
            "finish_reason": "length",
            "extra": {"draft_n": 12, "draft_n_accepted": 11},
        },
    ),
    Trap(
        "recorded: vLLM, token_ids under speculation, text and finish reason in one chunk",
        plain(
            '{"id":"chatcmpl-a","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant",'
            '"content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}',
            '{"choices":[{"index":0,"delta":{"content":"picklepicklepicklepickle"},"logprobs":null,"finish_reason":null,'
            '"token_ids":[2570,2570,2570,2570]}]}',
            '{"choices":[{"index":0,"delta":{"content":" operations"},"logprobs":null,"finish_reason":"length",'
            '"stop_reason":null,"token_ids":[3628]}]}',
            '{"choices":[],"usage":{"prompt_tokens":13,"total_tokens":18,"completion_tokens":5}}',
            DONE,
        ),
        expected={"output_tokens": 5, "tokens": [4, 1], "finish_reason": "length", "prompt_tokens": 13},
    ),
    Trap(
        "recorded: SGLang chat, reasoning_content null beside content, an empty finish chunk",
        plain(
            '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
            '{"choices":[{"index":0,"delta":{"reasoning_content":null,"content":"picklepickle"},"logprobs":null,'
            '"finish_reason":null,"matched_stop":null}]}',
            '{"choices":[{"index":0,"delta":{"reasoning_content":null},"finish_reason":"length"}]}',
            '{"choices":[],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}',
            DONE,
        ),
        expected={"text": "picklepickle", "output_tokens": 2, "tokens": [None]},
    ),
    Trap(
        "SGLang /generate repeats the text so far",
        plain(
            '{"text":"one","meta_info":{"prompt_tokens":4,"completion_tokens":1,"cached_tokens":0,"finish_reason":null}}',
            '{"text":"one two three","meta_info":{"prompt_tokens":4,"completion_tokens":3,"cached_tokens":0,'
            '"finish_reason":null}}',
            '{"text":"one two three.","meta_info":{"prompt_tokens":4,"completion_tokens":4,"cached_tokens":0,'
            '"finish_reason":{"type":"length","length":4},"spec_verify_ct":2}}',
            DONE,
        ),
        expected={
            "text": "one two three.",
            "output_tokens": 4,
            "cached_tokens": 0,
            "tokens": [1, 2, 1],
            "finish_reason": "length",
            "extra": {"spec_verify_ct": 2},
        },
    ),
    Trap(
        "SGLang /generate sends only what is new, and one event without new tokens",
        plain(
            '{"text":"a","meta_info":{"completion_tokens":2,"finish_reason":null}}',
            '{"text":"a","meta_info":{"completion_tokens":2,"finish_reason":null}}',
            '{"text":"b","meta_info":{"completion_tokens":3,"finish_reason":{"type":"stop"}}}',
            DONE,
        ),
        expected={"text": "aab", "output_tokens": 3, "tokens": [2, 1], "finish_reason": "stop"},
    ),
    Trap(
        "usage in every chunk",
        plain(
            '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":{"prompt_tokens":3,"completion_tokens":0}}',
            '{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
            '{"choices":[{"index":0,"delta":{"content":"b"}}],"usage":{"prompt_tokens":3,"completion_tokens":6}}',
            '{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":7}}',
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}',
            DONE,
        ),
        expected={"output_tokens": 7, "tokens": [2, 4, 1]},
    ),
    Trap(
        "usage never: nobody counted, which is not zero",
        plain(ROLE, chat("a"), chat("b"), chat("", "stop"), DONE),
        expected={"output_tokens": None, "counter": None, "tokens": [None, None], "text": "ab"},
    ),
    Trap(
        "usage null in every chunk",
        plain(chat("a", None, usage=None), chat("b", "stop", usage=None), USAGE % 2, DONE),
        expected={"output_tokens": 2, "tokens": [None, None]},
    ),
    Trap(
        "recorded: transformers, usage in the finish chunk and no [DONE]",
        plain(ROLE, chat("a"), chat("b", "stop", usage={"prompt_tokens": 4, "completion_tokens": 2})),
        expected={"output_tokens": 2, "prompt_tokens": 4, "tokens": [None, None]},
    ),
    Trap(
        "CR LF line ends",
        plain(ROLE, chat("a", "stop"), USAGE % 1, DONE, end="\r\n"),
        expected={"text": "a", "output_tokens": 1},
    ),
    Trap(
        "CR line ends",
        plain(ROLE, chat("a", "stop"), USAGE % 1, DONE, end="\r"),
        expected={"text": "a", "output_tokens": 1},
    ),
    Trap(
        "comments, keep-alives, and fields nobody asked for",
        STREAM
        + chunked(
            b": ping\n\n",
            b"id: 7\nretry: 100\n" + sse(chat("a"))[0],
            b":\n\n: \n" + sse(chat("b", "stop"))[0] + b":\n\n",
            *sse(USAGE % 2, DONE),
        ),
        expected={"text": "ab", "output_tokens": 2, "tokens": [None, None]},
    ),
    Trap(
        "data over several lines, without the space, and a byte order mark",
        STREAM
        + chunked(
            b'\xef\xbb\xbfdata:{"choices":[{"index":0,\ndata: "delta":{"content":"a"},\n'
            b'data:"finish_reason":"stop"}]}\n\n',
            b"data:[DONE]\n\n",
        ),
        expected={"text": "a", "output_tokens": None},
    ),
    Trap(
        "several events in one chunk: one arrival time, each with its tokens",
        STREAM + chunked(b"".join(sse(chat("a"), chat("b"), chat("c", "stop"))), *sse(USAGE % 3, DONE)),
        expected={"text": "abc", "output_tokens": 3, "tokens": [None, None, None]},
    ),
    Trap(
        "one event over several chunks",
        STREAM
        + chunked(
            b'data: {"choices":[{"index":0,"del',
            b'ta":{"content":"a"},"finish_reason":"stop"}]}',
            b"\n",
            b"\n",
            *sse(DONE),
        ),
        expected={"text": "a", "tokens": [None]},
    ),
    Trap(
        "only reasoning_content, then content (sglang#23954: TTFT 0)",
        plain(
            '{"choices":[{"index":0,"delta":{"role":"assistant","content":null,"reasoning_content":""}}]}',
            '{"choices":[{"index":0,"delta":{"content":null,"reasoning_content":"hm"}}]}',
            '{"choices":[{"index":0,"delta":{"content":"yes","reasoning_content":null},"finish_reason":"stop"}]}',
            USAGE % 2,
            DONE,
        ),
        expected={"text": "hmyes", "output_tokens": 2, "tokens": [None, None]},
    ),
    Trap(
        "reasoning, as vLLM calls it now",
        plain('{"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}', chat("yes", "stop"), USAGE % 2, DONE),
        expected={"text": "hmyes", "tokens": [None, None]},
    ),
    Trap(
        "tool-call deltas are generated tokens",
        plain(
            ROLE,
            '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"look","arguments":""}}]}}]}',
            '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\":1}"}}]}}]}',
            '{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}',
            USAGE % 8,
            DONE,
        ),
        expected={"text": 'look{"x":1}', "output_tokens": 8, "tokens": [None, None], "finish_reason": "tool_calls"},
    ),
    Trap(
        "several choices",
        plain(
            '{"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"b"}}]}',
            '{"choices":[{"index":1,"delta":{"content":"c"},"finish_reason":"stop"}]}',
            USAGE % 3,
            DONE,
        ),
        expected={"output_tokens": 3, "tokens": [None, None], "text": "abc"},
    ),
    Trap(
        "text completions",
        plain(
            '{"choices":[{"index":0,"text":"a","finish_reason":null}]}',
            '{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}',
            USAGE % 2,
            DONE,
        ),
        expected={"text": "ab", "output_tokens": 2, "finish_reason": "length"},
    ),
    Trap(
        "UTF-8 of four bytes",
        plain(ROLE, chat("a\U0001f600é", "stop"), USAGE % 3, DONE),
        expected={"text": "a\U0001f600é"},
    ),
    Trap(
        "UTF-8 unescaped on the wire",
        plain('{"choices":[{"index":0,"delta":{"content":"日本語"},"finish_reason":"stop"}]}', USAGE % 3, DONE),
        expected={"text": "日本語", "output_tokens": 3},
    ),
    Trap(
        "no last line end",
        STREAM + chunked(*sse(chat("a", "stop"), USAGE % 1), b"data: [DONE]"),
        expected={"text": "a", "output_tokens": 1},
    ),
    Trap(
        "chunk extensions and trailers",
        STREAM + chunked(*sse(chat("a", "stop"), USAGE % 1, DONE), extension=b";x=1", trailer=b"X-Sum: 3\r\n"),
        expected={"text": "a", "output_tokens": 1},
    ),
    Trap(
        "identity body until the connection closes",
        head(chunks=False) + b"".join(sse(ROLE, chat("a", "stop"), USAGE % 1, DONE)),
        expected={"text": "a", "output_tokens": 1},
        closed=True,
    ),
    Trap(
        "an interim response first",
        b"HTTP/1.1 100 Continue\r\n\r\n" + plain(chat("a", "stop"), USAGE % 1, DONE),
        expected={"text": "a", "status": 200},
    ),
    Trap(
        "an answer that was not streamed",
        head("application/json", "Content-Length: 133", chunks=False)
        + b'{"choices":[{"index":0,"message":{"content":"hello"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":2}}     ',
        expected={"text": "hello", "output_tokens": 2, "extra": {"streamed": False}},
    ),
    Trap(
        "recorded: an engine dies in mid-stream: an error object in a 200 (pegainfer#548 counted it as success)",
        plain(
            ROLE,
            chat("a"),
            '{"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}',
            DONE,
        ),
        ok=False,
        expected={"reason": "error", "detail": "EngineCore encountered an issue", "tokens": [None]},
    ),
    Trap(
        "an error event by name",
        STREAM + chunked(*sse(chat("a")), b'event: error\ndata: {"message":"boom"}\n\n', *sse(DONE)),
        ok=False,
        expected={"reason": "error", "detail": "boom"},
    ),
    Trap(
        "recorded: vLLM on SIGINT says abort",
        plain(ROLE, chat("a"), chat("", "abort"), USAGE % 1, DONE),
        ok=False,
        expected={"reason": "error"},
    ),
    Trap(
        "SGLang aborts",
        plain(
            '{"text":"","meta_info":{"completion_tokens":0,"finish_reason":{"type":"abort","message":"too long"}}}',
            DONE,
        ),
        ok=False,
        expected={"reason": "error", "detail": "aborted: too long"},
    ),
    Trap("zero tokens", plain(ROLE, chat("", "stop"), USAGE % 0, DONE), ok=False, expected={"reason": "no tokens"}),
    Trap(
        "text, and a count of zero",
        plain(chat("a", "stop"), USAGE % 0, DONE),
        ok=False,
        expected={"reason": "no tokens"},
    ),
    Trap(
        "the chunks' tokens and the total differ",
        plain(
            '{"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1,2,3],"finish_reason":"stop"}]}',
            USAGE % 4,
            DONE,
        ),
        ok=False,
        expected={"reason": "identity", "detail": "chunks carry 3 tokens, the server counted 4"},
    ),
    Trap(
        "a running count goes backwards",
        plain(
            '{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"completion_tokens":3}}',
            '{"choices":[{"index":0,"delta":{"content":"b"}}],"usage":{"completion_tokens":2}}',
            DONE,
        ),
        ok=False,
        expected={"reason": "malformed"},
    ),
    Trap(
        "a proper end of HTTP, but neither finish reason nor [DONE]",
        plain(ROLE, chat("a")),
        ok=False,
        expected={"reason": "ended early", "tokens": [None]},
    ),
    Trap(
        "disconnected within an event",
        STREAM + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in sse(ROLE, chat("a"))) + b'80\r\ndata: {"choi',
        ok=False,
        expected={"reason": "disconnected", "tokens": [None]},
        closed=True,
    ),
    Trap(
        "disconnected before a header came",
        b"",
        ok=False,
        expected={"reason": "disconnected", "status": None},
        closed=True,
    ),
    Trap(
        "a busy server: 503 with a body",
        head("application/json", "Content-Length: 31", status="503 Service Unavailable", chunks=False)
        + b'{"error":{"message":"too busy"}}'[:31],
        ok=False,
        expected={"reason": "status", "status": 503, "detail": 'HTTP 503: {"error":{"message":"too busy"}'},
    ),
    Trap(
        "recorded: llama.cpp refuses a prompt that is too long: 400",
        head("application/json", "Content-Length: 54", status="400 Bad Request", chunks=False)
        + b'{"error":{"code":400,"message":"request (3024 tokens)"}',
        ok=False,
        expected={"reason": "status", "status": 400},
    ),
    Trap(
        "a redirect is refused",
        head(
            "text/html",
            "Location: http://elsewhere/",
            "Content-Length: 0",
            status="307 Temporary Redirect",
            chunks=False,
        ),
        ok=False,
        expected={"reason": "redirected", "status": 307, "detail": "HTTP 307 to `http://elsewhere/`"},
    ),
    Trap(
        "gzip though identity was asked for",
        head("text/event-stream", "Content-Encoding: gzip") + chunked(b"\x1f\x8b\x08\x00"),
        ok=False,
        expected={"reason": "compressed"},
    ),
    Trap("an event that is not JSON", plain("hello", DONE), ok=False, expected={"reason": "malformed"}),
    Trap("an event that is a list", plain("[1]", DONE), ok=False, expected={"reason": "malformed"}),
    Trap(
        "not HTTP at all", b"SSH-2.0-OpenSSH_9.2\r\n\r\n\r\n", ok=False, expected={"reason": "malformed"}, closed=True
    ),
    Trap(
        "a chunk size that is none", STREAM + b"zz\r\nabc\r\n", ok=False, expected={"reason": "malformed"}, closed=True
    ),
    Trap(
        "a refusal is generated text",
        plain(ROLE, '{"choices":[{"index":0,"delta":{"refusal":"No."},"finish_reason":"stop"}]}', USAGE % 2, DONE),
        expected={"text": "No.", "output_tokens": 2, "tokens": [None]},
    ),
    Trap(
        "content as a list of typed parts",
        plain(
            '{"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},'
            '"finish_reason":"stop"}]}',
            USAGE % 2,
            DONE,
        ),
        expected={"text": "ab", "output_tokens": 2, "tokens": [None]},
    ),
    Trap(
        "cached tokens in the usage alone, as vLLM and SGLang say them",
        plain(
            chat("a", "stop"),
            '{"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":64}}}',
            DONE,
        ),
        expected={"prompt_tokens": 90, "cached_tokens": 64, "output_tokens": 1},
    ),
    Trap(
        "cached tokens in llama.cpp's timings alone",
        plain(chat("a", "stop", timings={"cache_n": 24, "prompt_n": 52, "predicted_n": 1}), DONE),
        expected={"cached_tokens": 24, "output_tokens": 1, "tokens": [1]},
    ),
    Trap(
        "an end token that no chunk carried: it counts with the last one, and the record says so",
        plain(
            chat("a", None, usage={"prompt_tokens": 3, "completion_tokens": 1}),
            chat("b", "stop", usage={"prompt_tokens": 3, "completion_tokens": 2}),
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":3}}',
            DONE,
        ),
        expected={"output_tokens": 3, "tokens": [1, 2], "extra": {"tokens_after_last_chunk": 1}},
    ),
    Trap(
        "bytes after the end that nobody asked for",
        plain(chat("a", "stop"), USAGE % 1, DONE) + b"junk",
        ok=False,
        expected={"reason": "malformed", "detail": "4 bytes came after the end of the response"},
    ),
)
