"""Prompt sets: found by name, read with every fault named, known by digest, sliced without overlap."""

import hashlib
import json

import pytest

from harness.errors import InputError
from harness.load import answers, prompts


def written(tmp_path, *lines, name="set.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_named_set_is_found_from_a_recipe_and_known_by_the_digest_of_its_file(tmp_path):
    (tmp_path / "recipes" / "prompts").mkdir(parents=True)
    path = written(
        tmp_path / "recipes" / "prompts", {"id": "a", "text": "one"}, {"id": "b", "prompt": "two"}, name="mine.jsonl"
    )
    found = prompts.load("mine", beside=tmp_path / "recipes")
    assert [(each.prompt_id, each.prompt) for each in found.prompts] == [("a", "one"), ("b", "two")]
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(found) == 2


def test_the_sets_that_come_with_the_harness_are_found_from_anywhere(tmp_path):
    assert len(prompts.load("coding", beside=tmp_path)) == 256


def test_a_misspelt_set_gets_a_suggestion(tmp_path):
    with pytest.raises(InputError) as caught:
        prompts.load("codng", beside=tmp_path)
    assert str(caught.value) == "there is no prompt set `codng`\n\nhint: did you mean `coding`?"


def test_every_fault_of_a_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{nope\n\n[1]\n{"id": "c"}\n{"id": "a", "text": "y"}\n')
    with pytest.raises(InputError) as caught:
        prompts.load(str(path))
    head, *faults = str(caught.value).splitlines()
    assert head == "4 faults"
    assert f"  two prompts of `{path}` are called `a`" in faults
    placed = sorted(fault.removeprefix(f"  {path}:")[:40] for fault in faults if str(path) + ":" in fault)
    assert placed[0].startswith("2:1: not valid JSON")
    assert placed[1].startswith("4:1: an object was expected, got a list"[:40])
    assert placed[2].startswith("5:1: an entry needs `text`")


def test_the_same_prompt_twice_is_a_fault_for_the_second_would_be_cached(tmp_path):
    path = written(tmp_path, {"id": "a", "text": "x"}, {"id": "b", "text": "x"})
    with pytest.raises(InputError, match=r"prompts `a` and `b` of .* are the same"):
        prompts.load(str(path))


def test_sharegpt_conversations_become_turns_with_their_recorded_answers(tmp_path):
    path = tmp_path / "share.json"
    talk = [("human", "hi"), ("gpt", "hello"), ("human", "bye"), ("gpt", "so long")]
    entry = {"id": "s1", "conversations": [{"from": who, "value": said} for who, said in talk]}
    opening = {"id": "s2", "conversations": [{"from": "gpt", "value": "?"}, {"from": "human", "value": "alone"}]}
    path.write_text(json.dumps([entry, opening]))
    first, second, third = prompts.load(str(path)).prompts
    assert (first.prompt_id, first.conversation) == ("s1/0", "s1")
    assert first.prompt == [{"role": "user", "content": "hi"}]
    assert [message["content"] for message in second.prompt] == ["hi", "hello", "bye"]
    assert (third.prompt_id, third.conversation, third.prompt) == ("s2", None, [{"role": "user", "content": "alone"}])


def test_a_set_says_whose_answers_a_conversation_goes_on_with(tmp_path):
    talk = [{"from": who, "value": said} for who, said in [("human", "hi"), ("gpt", "hello"), ("human", "bye")]]
    entries = [{"id": "a", "conversations": talk, "answers": "served"}, {"id": "b", "turns": ["one", "two", "three"]}]
    loaded = {prompt.prompt_id: prompt for prompt in prompts.load(str(written(tmp_path, *entries))).prompts}
    said = {name: [message["content"] for message in prompt.prompt] for name, prompt in loaded.items()}
    assert said["a/1"] == ["hi", answers.mark(0), "bye"]
    assert said["b/2"] == ["one", answers.mark(0), "two", answers.mark(1), "three"]
    assert [message["role"] for message in loaded["b/2"].prompt] == ["user", "assistant", "user", "assistant", "user"]


def test_answers_that_nobody_recorded_or_nobody_knows_are_faults(tmp_path):
    path = written(tmp_path, {"turns": ["x", "y"], "answers": "recorded"}, {"turns": ["z"], "answers": "invented"})
    with pytest.raises(InputError) as caught:
        prompts.load(str(path))
    assert "`turns` hold no answers, so that none are recorded" in str(caught.value)
    assert "`answers` is `recorded` or `served`, not `invented`" in str(caught.value)


def test_slices_are_disjoint_until_the_set_is_used_up():
    found = prompts.load("synthetic:words=3,count=5")
    assert [each.prompt_id[-1] for each in found.slice(0, 3)] == ["0", "1", "2"]
    assert [each.prompt_id[-1] for each in found.slice(3, 4)] == ["3", "4", "0", "1"]
    assert (found.wraps(0, 3), found.wraps(3, 2), found.wraps(3, 3)) == (False, False, True)


def test_synthetic_sets_have_the_length_asked_and_are_the_same_for_the_same_seed():
    one, again, other = (prompts.load(f"synthetic:words=50,count=20,seed={seed}") for seed in (1, 1, 2))
    assert {len(each.prompt.split()) for each in one.prompts} == {50}
    assert one.sha256 == again.sha256 != other.sha256
    assert len({each.prompt for each in one.prompts}) == 20


def test_a_shared_prefix_is_shared_by_turns():
    texts = [each.prompt for each in prompts.load("shared-prefix:prefix=30,words=5,groups=2,count=4").prompts]
    prefixes = [" ".join(text.split()[:30]) for text in texts]
    assert prefixes[0] == prefixes[2] != prefixes[1] == prefixes[3]
    assert len(set(texts)) == 4


def test_options_that_are_none_are_named_all_at_once():
    with pytest.raises(InputError) as caught:
        prompts.load("synthetic:word=5,count,words=0")
    assert str(caught.value).splitlines() == [
        "3 faults",
        "  prompt set `synthetic:word=5,count,words=0`: unknown option `word` (did you mean `words`?)",
        "  prompt set `synthetic:word=5,count,words=0`: `count` is not `option=number`",
        "  prompt set `synthetic:word=5,count,words=0`: `words` must be at least 1",
    ]


def test_a_line_ends_at_a_line_feed_and_nowhere_inside_a_text(tmp_path):
    """Python counts U+2028, U+0085 and the form feed among line ends; JSON texts may hold the first two as they are."""
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "a\u2028b"}\r\n\n{"text": "c\x85d"}\n', encoding="utf-8", newline="")
    found = prompts.load(str(path)).prompts
    assert [(each.prompt_id, each.prompt) for each in found] == [("set-000", "a\u2028b"), ("set-001", "c\x85d")]


def test_a_list_may_hold_bare_texts_and_whole_chats(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = tmp_path / "set.json"
    path.write_text(json.dumps(["one", {"messages": chat}, {"id": 7, "text": "two"}]))
    found = prompts.load(str(path)).prompts
    assert [(each.prompt_id, each.prompt) for each in found] == [("set-000", "one"), ("set-001", chat), ("7", "two")]


def test_who_speaks_in_a_conversation_is_known_by_any_of_the_usual_names(tmp_path):
    talk = [("system", "s"), ("user", "u1"), ("assistant", "a1"), ("human", "u2"), ("bard", "a2"), ("human", "u3")]
    path = written(tmp_path, {"id": "c", "conversations": [{"role": who, "content": said} for who, said in talk]})
    last = prompts.load(str(path)).prompts[-1].prompt
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]


def test_a_system_message_stays_before_answers_that_the_server_gives(tmp_path):
    talk = [("system", "s"), ("human", "u1"), ("gpt", "a1"), ("human", "u2")]
    entry = {"conversations": [{"from": who, "value": said} for who, said in talk], "answers": "served"}
    first, second = prompts.load(str(written(tmp_path, entry))).prompts
    assert [message["content"] for message in first.prompt] == ["s", "u1"]
    assert [message["content"] for message in second.prompt] == ["s", "u1", answers.mark(0), "u2"]


def test_conversations_may_begin_alike_for_only_their_later_turns_are_theirs(tmp_path):
    entries = [{"id": name, "turns": ["hi", f"then {name}"]} for name in ("a", "b")]
    assert len(prompts.load(str(written(tmp_path, *entries)))) == 4


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"messages": []}, "`messages` must be a list of objects with `role` and `content`"),
        ({"messages": [{"content": "no role"}]}, "`messages` must be a list of objects with `role` and `content`"),
        ({"conversations": "hi"}, "`conversations` must be a list"),
        ({"conversations": [{"from": "human"}]}, "each of `conversations` needs `from` and `value`"),
        ({"conversations": [7]}, "each of `conversations` needs `from` and `value`"),
        ({"turns": ["x", ""]}, "`turns` must be a list of texts"),
        ({"turns": "x"}, "`turns` must be a list of texts"),
        ({"text": ""}, "an entry needs `text`, `prompt`, `messages`, `turns` or `conversations`"),
        ({"text": 5}, "an entry needs `text`, `prompt`, `messages`, `turns` or `conversations`"),
    ],
)
def test_an_entry_that_cannot_be_asked_is_a_fault_with_its_line(tmp_path, entry, said):
    path = written(tmp_path, {"text": "good"}, entry)
    with pytest.raises(InputError) as caught:
        prompts.load(str(path))
    assert str(caught.value) == f"{path}:2:1: {said}"


def test_a_file_without_prompts_or_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes('{"text": "caf\xe9"}'.encode("latin-1"))
    (tmp_path / "torn.json").write_text('[{"text": "x"},')
    for name, said in (
        ("empty.jsonl", "holds no prompts"),
        ("latin.jsonl", "is not UTF-8 text: invalid continuation byte at byte 13"),
        ("torn.json", "torn.json:1:1: not valid JSON"),
    ):
        with pytest.raises(InputError, match=said):
            prompts.load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "half \\ud800 a pair"}', "surrogates not allowed"),
        ('{"text": ' + "[" * 200_000, "recursion depth exceeded"),
    ],
)
def test_what_no_server_could_be_sent_is_a_fault_with_its_line(tmp_path, line, said):
    (tmp_path / "set.jsonl").write_text('{"text": "a whole pair \\ud83d\\ude00"}\n' + line)
    with pytest.raises(InputError, match=said) as caught:
        prompts.load(str(tmp_path / "set.jsonl"))
    assert str(caught.value).startswith(f"{tmp_path / 'set.jsonl'}:2:1: not valid JSON")


def test_a_path_starts_from_the_recipe_or_from_a_folder_above_it(tmp_path):
    (tmp_path / "recipes" / "deep").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    path = written(tmp_path / "data", {"text": "x"})
    beside = tmp_path / "recipes" / "deep"
    assert prompts.load("data/set.jsonl", beside=beside).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert prompts.file_of("data/set.jsonl", beside=beside) == path
    assert prompts.file_of("synthetic:words=3", beside=beside) is None
    with pytest.raises(InputError, match=r"there is no prompt set `data/other\.jsonl`"):
        prompts.load("data/other.jsonl", beside=beside)


def test_made_sets_are_the_same_each_time_and_have_the_usual_size_when_nothing_is_said():
    assert [len(text.prompt.split()) for text in prompts.load("synthetic:").prompts] == [200] * 256
    assert [len(text.prompt.split()) for text in prompts.load("shared-prefix:").prompts] == [900] * 256
    same = [prompts.load("shared-prefix:prefix=9,words=2,count=3,seed=0").sha256 for _ in range(2)]
    assert same[0] == same[1] != prompts.load("shared-prefix:prefix=9,words=2,count=3,seed=1").sha256


def test_collected_conversations_that_ask_nothing_or_nothing_new_are_left_out(tmp_path):
    """As ShareGPT's file has them: pieces of longer talks, some of an answer alone or of nothing, and repetitions."""

    def talk(name, *said):
        return {"id": name, "conversations": [{"from": who, "value": text} for who, text in said]}

    hi, answer, bye = ("human", "hi"), ("gpt", "hello"), ("human", "bye")
    entries = [
        talk("a", hi, answer),
        talk("nothing"),
        talk("answer", answer),
        talk("b", hi, answer, bye),
        talk("a-again", hi, ("gpt", "another answer")),
        talk("b-again", hi, answer, bye, answer),
        talk("c", hi, ("gpt", "another answer"), bye),
        talk("d", bye, answer, hi),
        talk("beginning-of-d", bye, answer),
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    assert [each.prompt_id for each in prompts.load(str(path)).prompts] == [
        "a",
        "b/0",
        "b/1",
        "c/0",
        "c/1",
        "d/0",
        "d/1",
    ]
    path.write_text(json.dumps(entries[1:3]))
    with pytest.raises(InputError, match="holds no prompts"):
        prompts.load(str(path))
