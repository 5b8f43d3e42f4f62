import os
from pathlib import Path

import pytest

from harness.files import escape_control
from harness.recipe.secrets import holds_secret, is_secret, looks_secret
from harness.run import privacy


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("api-key", True),
        ("admin-api-key", True),
        ("apikey", True),
        ("DB_PASSWORD", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("AUTHORIZATION", True),
        ("proxy-authorization", True),
        ("BASIC_AUTH", True),
        ("HF_TOKEN_2", True),
        ("KEY2", True),
        ("api-keys", True),
        ("TOKENS", True),
        ("HF_TOKENS", True),
        ("BEARER", True),
        ("PASSPHRASE", True),
        ("ssl-keyfile-password", True),
        ("PGPASSWORD", True),
        ("CREDENTIALS", True),
        ("max-total-tokens", False),
        ("SGLANG_MAX_THINK_TOKENS", False),
        ("MAX_TOKENS_2", False),
        ("pad_token", False),
        ("eos_token_id", False),
        ("SGLANG_USE_AITER_FP8_PER_TOKEN", False),
        ("bucket-time-to-first-token", False),
        ("author", False),
        ("AUTHORS", False),
        ("auth-type", False),
        ("ssl-keyfile", False),
        ("tokens-only", False),
        ("MONKEY", False),
        ("tokenizer-path", False),
        ("num_draft_tokens", False),
        ("speculative-token-map", False),
        ("KEYBOARD", False),
        ("PATH", False),
    ],
)
def test_a_secret_is_known_by_its_name(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("https://ab12cd34@host/v1", True),
        ("see http://me:word@host", True),
        ("Bearer sekret-12", True),
        ("X-Auth: bearer abcdefgh", True),
        ("Authorization: abc", True),
        ("hf_abcdefgh", True),
        ("--token=ghp_abcdefgh", True),
        ("sk-abcdefgh", True),
        ('{"key": "sk-abcdefghijklmnop"}', True),
        ("https://host/v1?mail=me@host", False),
        ("https://host/@me", False),
        ("me@host", False),
        ("the bearer of it", False),
        ("hf_short", False),
        ('{"hf_overrides": {"rope_scaling": null}}', False),
        ("/data/sk-learn-models", False),
        ("disk-cache-of-blocks", False),
    ],
)
def test_a_secret_is_known_by_its_value_too(value: str, secret: bool) -> None:
    assert looks_secret(value) is secret


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("api-key", "abcdef", True),
        ("hf-overrides", {"api_key": "abcdef"}, True),
        ("header", ["X: 1", "Authorization: Bearer abcdefgh"], True),
        ("allow-credentials", True, False),
        ("SGLANG_LOG_DECODE_GRAPH_KEY", "1", False),
        ("api-key", None, False),
    ],
)
def test_a_secret_is_found_wherever_a_value_holds_it(name: str, value: object, secret: bool) -> None:
    assert holds_secret(name, value) is secret


def test_argv_is_stored_without_secrets() -> None:
    argv = [
        "serve",
        "--api-key",
        "abcdef",
        "--admin-key=ghijkl",
        "--port",
        "8000",
        "--header",
        "Bearer abcdef",
        "--token",
    ]
    assert privacy.redact_argv(argv, {"KEY": "abcdef"}) == [
        "serve",
        "--api-key",
        "[redacted]",
        "--admin-key=[redacted]",
        "--port",
        "8000",
        "--header",
        "Bearer [KEY]",
        "--token",
    ]


def test_variables_are_stored_without_secrets_wherever_their_value_appears() -> None:
    secrets = privacy.secret_values(
        ["MY_ACCESS"], {"MY_ACCESS": "sesame", "HF_TOKEN": "hf_123", "A": "x", "P_KEY": "1"}
    )
    assert secrets == {"HF_TOKEN": "hf_123", "MY_ACCESS": "sesame"}
    stored = privacy.redact_variables(
        {"MY_ACCESS": "sesame", "HF_TOKEN": "hf_123", "URL": "http://u:sesame@h"}, secrets
    )
    assert stored == {"HF_TOKEN": "[redacted]", "MY_ACCESS": "[redacted]", "URL": "http://u:[MY_ACCESS]@h"}


def test_the_longer_of_two_nested_secrets_is_hidden_whole() -> None:
    assert privacy.redact_text("key abcdef!", {"A": "abcd", "B": "abcdef"}) == "key [B]!"


def test_a_server_gets_the_plans_variables_named_secrets_and_little_else() -> None:
    ambient = {
        "PATH": "/bin",
        "HOME": "/h",
        "LC_ALL": "C",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "t",
        "OTHER_TOKEN": "u",
        "PYTHONPATH": "/evil",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HTTP_PROXY": "http://p",
    }
    got = privacy.server_environment({"OMP_NUM_THREADS": "8", "LC_ALL": "de"}, secrets=["HF_TOKEN"], ambient=ambient)
    assert got == {
        "PATH": "/bin",
        "HOME": "/h",
        "LC_ALL": "de",
        "HF_TOKEN": "t",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "8",
    }
    assert privacy.withheld(got, ambient) == ["NCCL_DEBUG", "PYTHONPATH"]


def test_a_private_folder_is_private_under_any_umask_and_an_existing_one_is_left_as_it_is(tmp_path: Path) -> None:
    old = os.umask(0o000)
    try:
        assert privacy.private_folder(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    assert privacy.private_folder(shared).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字\t", "plain é 漢字\t"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("over\rwritten\n", "over\\rwritten\\n"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff\x9b31m", "\\udcff\\x9b31m"),
    ],
)
def test_untrusted_text_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert escape_control(text) == shown
