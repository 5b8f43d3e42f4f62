"""The simulated server's HTTP parsing, its text and its faults: pure parts, no process."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.simulation import faults, http
from harness.engines.simulation.http import BadMessage, Message, parse
from harness.engines.simulation.reply import BadAsk, ask
from harness.engines.simulation.text import BLOCK, WORDS, PrefixCache, Writer, divergence, identity, split

REQUEST = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"


@given(st.integers(min_value=0, max_value=len(REQUEST)))
def test_a_request_is_parsed_only_when_all_of_it_is_there(cut):
    found = parse(bytearray(REQUEST[:cut]))
    if cut < len(REQUEST):
        assert found is None
    else:
        assert found == (
            Message("POST", "/v1/completions", {"host": "a", "content-length": "4"}, b"body"),
            len(REQUEST),
        )


def test_what_follows_a_request_stays_in_the_buffer():
    _, used = parse(bytearray(REQUEST + REQUEST))
    assert used == len(REQUEST)


def test_a_chunked_body_is_put_together():
    raw = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nbod\r\n1\r\ny\r\n0\r\n\r\n"
    message, used = parse(bytearray(raw))
    assert (message.body, used) == (b"body", len(raw))
    assert all(parse(bytearray(raw[:cut])) is None for cut in range(len(raw)))


@pytest.mark.parametrize(
    ("raw", "status", "said"),
    [
        (b"hello\r\n\r\n", 400, "not an HTTP/1.1 request line"),
        (b"GET / HTTP/2\r\n\r\n", 400, "not an HTTP/1.1 request line"),
        (b"GET / HTTP/1.1\r\nno colon here\r\n\r\n", 400, "a header line without a colon"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "content-length is not a number"),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413, "request body too large"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "bad chunk size"),
        (b"x" * (http.MAX_HEAD + 1), 431, "request head too long"),
    ],
)
def test_what_cannot_become_a_request_is_refused(raw, status, said):
    with pytest.raises(BadMessage, match=said) as caught:
        parse(bytearray(raw))
    assert caught.value.status == status


def chat(**fields):
    body = {"messages": [{"role": "user", "content": "hi there"}], **fields}
    return Message("POST", "/v1/chat/completions", {}, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message("POST", "/generate", {}, b"{"), "the body is not JSON"),
        (Message("POST", "/generate", {}, b"[]"), "not a JSON object"),
        (Message("POST", "/generate", {}, b"{}"), "text: a str was expected, got null"),
        (chat(messages="hi"), "messages: a list was expected"),
        (chat(messages=["hi"]), "messages: a list of objects was expected"),
        (chat(messages=[{"role": "user", "content": 3}]), "`content` must be a text"),
        (chat(max_tokens=0), "max_tokens: a whole number above 0 was expected, got 0"),
        (chat(max_tokens=True), "max_tokens: a whole number above 0 was expected, got true"),
        (chat(max_tokens="9"), 'max_tokens: a whole number above 0 was expected, got "9"'),
        (chat(stream_options=7), "stream_options: a dict was expected"),
    ],
)
def test_a_body_that_is_not_a_request_is_refused_with_the_field(message, said):
    with pytest.raises(BadAsk, match=said):
        ask(message, "simulated")


def test_greedy_requests_ignore_the_seed_and_sampled_ones_do_not():
    greedy = {ask(chat(temperature=0, seed=seed), "m").key for seed in (1, 2)}
    sampled = {ask(chat(temperature=1, seed=seed), "m").key for seed in (1, 2)}
    assert (len(greedy), len(sampled)) == (1, 2)


def test_text_depends_on_its_key_alone_and_not_on_how_it_is_cut():
    whole = Writer(7).write(50)
    writer = Writer(7)
    assert "".join(writer.write(size) for size in (1, 4, 20, 25)) == whole
    assert Writer(8).write(50) != whole
    assert len(set(WORDS)) == 4096
    assert len(split(whole)) == 50  # a token is a word, so a reader can count them


def test_a_diverging_text_agrees_up_to_its_position_and_not_after():
    plain, other = split(Writer(7).write(40)), split(Writer(7, diverges_at=12).write(40))
    assert plain[:12] == other[:12]
    assert plain[12] != other[12]
    assert sum(a == b for a, b in zip(plain[12:], other[12:], strict=True)) <= 2


def test_the_asked_share_of_prompts_diverges_at_the_asked_mean():
    places = [divergence(identity("prompt", index), 0.3, 20.0) for index in range(8000)]
    leaving = [place for place in places if place is not None]
    assert len(leaving) / 8000 == pytest.approx(0.3, abs=0.02)
    # Geometric from 0 with chance 1/20 a token: mean 19, its standard error here 0.4.
    assert sum(leaving) / len(leaving) == pytest.approx(19, abs=1.6)
    assert divergence(1, 0.0, 20.0) is None
    assert divergence(1, 1.0, 1.0) == 0


def test_the_prefix_cache_finds_whole_blocks_from_the_start_and_never_all_of_a_prompt():
    cache = PrefixCache(1024)
    words = [str(index) for index in range(64)]
    assert cache.take(words) == 0
    assert cache.take(words) == 63
    assert cache.take(words[:40]) == 2 * BLOCK
    assert cache.take(words[:16] + ["other"] * 48) == BLOCK
    assert cache.take(["x", *words]) == 0
    cache.clear()
    assert cache.take(words) == 0


def test_a_full_prefix_cache_forgets_what_was_not_used_for_longest():
    cache = PrefixCache(4 * BLOCK)
    first, second = ([f"{name}{index}" for index in range(2 * BLOCK + 1)] for name in "ab")
    cache.take(first)
    cache.take(second)
    cache.take([f"c{index}" for index in range(2 * BLOCK)])
    assert cache.take(second) == 2 * BLOCK
    assert PrefixCache(0).take(first) == PrefixCache(0).take(first) == 0


def test_faults_hit_the_requests_they_are_aimed_at():
    chosen = faults.read(["status=503", "ignore-term"], first=2, every=3, count=2)
    assert [number for number in range(20) if chosen.of_request(number)] == [2, 5]
    assert chosen.of_request(5) == {"status": 503}
    assert chosen.get("ignore-term") is True
    assert chosen.get("status") is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trunkated", "no fault is called `trunkated`, did you mean `truncated`?"),
        ("truncated=3", "fault `truncated` takes no value, got `3`"),
        ("status=bad", "fault `status` takes a whole number, got `bad`"),
        ("slow-start=soon", "fault `slow-start` takes a number, got `soon`"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused(word, said):
    with pytest.raises(ValueError, match=f"^{said.replace('?', '[?]')}$"):
        faults.read([word])


def test_a_fault_without_its_value_takes_the_default():
    assert faults.read(["status"]).of_request(0) == {"status": 500}
