"""`harness bench` as a whole command, against a server whose truth is known."""

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import fakes.tls
import pytest
from fakes.scripted import scripted
from load_streams import ROLE, USAGE, chat, plain
from servers import serving

from benchmarks.truthd import COMPILER, start
from harness.cli import main
from harness.engines import simulated
from harness.run import facts

ROW = re.compile(
    r"^C= +(\d+) \| +(\d+) requests \| throughput: +([\d.]+) tok/s \| per-req: +([\d.]+) tok/s"
    r" \| latency avg/p50/p99: +[\d.]+/ +[\d.-]+/ +[\d.]+s \| ok: (\d+)/(\d+)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def truth():
    with start(native=COMPILER is not None, ttft_us=5000, gap_us=2000, count=1) as server:
        yield server


def bench(folder, *words):
    command = [sys.executable, "-m", "harness", "bench", *map(str, words)]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=120, check=False)


def test_a_sweep_prints_the_seeds_row_for_each_level_and_leaves_a_run_that_can_be_shown(truth, tmp_path):
    done = bench(tmp_path, truth.url, "-c", "1,3", "-n", "6", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(done.stdout)
    assert [(row[0], row[1], row[4], row[5]) for row in rows] == [("1", "6", "6", "6"), ("3", "6", "6", "6")]
    (run,) = (tmp_path / "runs").glob("*-bench-*")
    stored = [json.loads(path.read_text()) for path in sorted(run.glob("launches/*/levels/*/level.json"))]
    assert [level["output_tokens"] for level in stored] == [48, 48]
    assert all(len((path / "requests.jsonl").read_text().splitlines()) == 6 for path in run.glob("launches/*/levels/*"))
    shown = subprocess.run(
        [sys.executable, "-m", "harness", "show", run], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr


def test_json_is_all_that_stdout_holds(truth, tmp_path):
    done = bench(tmp_path, truth.url, "-c", "2", "-n", "4", "--max-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["requests"], level["ok"], level["client"]["peak_in_flight"]) == (4, 4, 2)


def records_of(folder):
    (path,) = folder.glob("runs/*/launches/*/levels/*/requests.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_arrivals_are_constant_when_asked(truth, tmp_path):
    words = ("--rate", "50", "--burstiness", "constant", "-n", "10", "--max-tokens", "2")
    assert bench(tmp_path, truth.url, *words).returncode == 0
    due = sorted(record["scheduled_s"] for record in records_of(tmp_path))
    assert [after - before for before, after in itertools.pairwise(due)] == pytest.approx([0.02] * 9, abs=1e-6)
    assert bench(tmp_path, truth.url, "--burstiness", "even").returncode == 2


def test_the_slots_of_a_closed_loop_begin_over_a_ramp_when_asked(truth, tmp_path):
    words = ("-c", "4", "--duration", "1.5", "--ramp-up", "1", "--max-tokens", "2")
    assert bench(tmp_path, truth.url, *words).returncode in {0, 6}  # it may never hold four at once
    records = records_of(tmp_path)
    for slot in range(4):  # 0, 0.25, 0.5 and 0.75 s after the start
        assert min(record["sent_s"] for record in records if record["slot"] == slot) >= 0.25 * slot
    refused = bench(tmp_path, truth.url, "--rate", "5", "--ramp-up", "1")
    assert (refused.returncode, "it goes with `concurrency`" in refused.stderr) == (2, True)


def test_every_fault_of_the_command_line_is_named_at_once(tmp_path):
    done = bench(tmp_path, "ftp://x/v1", "-c", "1,zero,-2", "-n", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 5 faults",
        "  `ftp://x/v1` is not a URL of a server (like http://127.0.0.1:8000)",
        "  `ftp://x/v1` has a path (give the server's address alone; --dialect says which path is asked)",
        "  --concurrency: `zero` is not a whole number above zero",
        "  --concurrency: `-2` is not a whole number above zero",
        "  --requests must be at least 1, got 0",
    ]
    assert not (tmp_path / "runs").exists()


def test_numbers_that_are_none_and_options_left_empty_are_named_not_replaced(tmp_path):
    done = bench(
        tmp_path, "127.0.0.1:1?x=1", "-c", "", "--rate", "nan,inf", "--duration", "nan", "--temperature", "inf"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 6 faults",
        "  `127.0.0.1:1?x=1` has a query (give the server's address alone)",
        "  --rate and --concurrency exclude each other",
        "  --rate: `nan` is not a number above zero",
        "  --rate: `inf` is not a number above zero",
        "  --duration must be a finite number, got nan",
        "  --temperature must be a finite number, got inf",
    ]
    done = bench(tmp_path, "127.0.0.1:1", "-c", "")
    assert (done.returncode, done.stderr) == (2, "error: --concurrency: `` is not a whole number above zero\n")


def test_a_damaged_prompt_file_is_named_with_its_line(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"text": "good"}\n{"text": \n')
    done = bench(tmp_path, "127.0.0.1:1", "--prompts", "set.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'set.jsonl'}:2:1: not valid JSON")


def test_more_streams_than_this_machine_lets_a_process_open_are_its_limit_not_the_servers_fault(truth, tmp_path):
    words = [sys.executable, "-m", "harness", "bench", truth.url, "-c", "400", "-n", "400", "--max-tokens", "2"]
    limits = (200, 200)
    done = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert done.returncode == 2
    assert re.search(
        r"error: this machine does not let a process open more than 1[89]\d connections: Too many open", done.stderr
    )
    assert "ulimit -Hn" in done.stderr


def test_an_interrupted_sweep_says_how_it_goes_on(tmp_path):
    """Ctrl-C reaches all of the foreground group, while the one stream that takes 20 s is under way."""
    with start(native=COMPILER is not None, ttft_us=5000, gap_us=200_000) as slow:
        words = [sys.executable, "-m", "harness", "bench", slow.url, "-c", "1", "-n", "1", "--max-tokens", "100"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, cwd=tmp_path, text=True, start_new_session=True, **pipes) as process:
            while slow.totals()["peak"] == 0:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    recipe = f"runs/recipes/bench-127.0.0.1-{slow.port}.yaml"
    assert said.endswith(f"hint: go on with `harness run {recipe} --out runs --resume`\n")


def level_of(done):
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    return level


def test_an_encrypted_server_is_measured_by_read_times_and_says_so(truth, tmp_path):
    folder = fakes.tls.certificate(tmp_path)
    words = ["-c", "2", "-n", "6", "--max-tokens", "8", "--json"]
    with scripted(fakes.tls.relay(truth.port), fakes.tls.context(folder)) as port:
        url = f"https://127.0.0.1:{port}"
        refused = bench(tmp_path, url, *words)
        assert refused.returncode == 5
        assert "its encryption cannot be trusted" in refused.stderr
        assert "self-signed certificate" in refused.stderr
        trusted = level_of(bench(tmp_path, url, *words, "--ca-file", "cert.pem"))
        blind = level_of(bench(tmp_path, url, *words, "--insecure"))
    for level in (trusted, blind):
        assert (level["ok"], level["output_tokens"]) == (6, 48)
        assert level["client"]["kernel_stamps"] is False
        assert level["client"]["lag_p99_s"] > 0


def test_a_server_that_is_recognised_is_watched_by_its_own_counters(tmp_path):
    """Six requests of 8 tokens: the simulated server's own counter says 48, and the observer knows its name."""
    with serving(simulated.ENGINE, tmp_path, args={"step-ms": 1, "sequence-ms": 0.1}) as server:
        level = level_of(bench(tmp_path, f"127.0.0.1:{server.port}", "-c2", "-n6", "--max-tokens=8", "--json"))
    assert level["simulated"] is True
    assert level["server"]["generated_tokens"] == 48
    assert level["server"]["running_max"] <= 2


VLLM = """\
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="m"}} {made}
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
"""


def test_a_server_that_owns_up_to_vllm_is_read_by_vllms_counters(tmp_path):
    """Each request makes 2 tokens by 1 draft of which 1 was accepted: (4 + 4) / 4 = 2 tokens a step."""
    made = []
    answer = plain(ROLE, chat("a"), chat("b", "length"), USAGE % 2, "[DONE]")

    def script(sock, _):
        while request := read_or_get(sock):
            if request.startswith(b"POST"):
                made.append(request)
                sock.sendall(answer)
                continue
            text = json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]})
            if b" /metrics " in request.partition(b"\r\n")[0]:
                text = VLLM.format(made=2 * len(made), drafts=len(made), accepted=len(made))
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text.encode())

    with scripted(script) as port:
        level = level_of(bench(tmp_path, f"127.0.0.1:{port}", "-c1", "-n4", "--max-tokens=2", "--json"))
    assert level["server"]["generated_tokens"] == 8
    assert level["server"]["acceptance_length"] == 2.0


def read_or_get(sock):
    """A request with a body, or one that has none and says no length."""
    head = b""
    while b"\r\n\r\n" not in head:
        more = sock.recv(1)
        if not more:
            return b""
        head += more
    length = re.search(rb"(?i)content-length: (\d+)", head)
    body = b""
    while length and len(body) < int(length[1]):
        body += sock.recv(1 << 16)
    return head + body


def test_goodput_counts_the_requests_that_keep_every_objective_and_is_printed(truth, tmp_path):
    words = ["-c", "2", "-n", "6", "--max-tokens", "8", "--name"]
    all_keep = bench(tmp_path, truth.url, *words, "easy", "--goodput", "ttft:60000,tpot:60000")
    none_keep = bench(tmp_path, truth.url, *words, "hard", "--goodput", "e2e:0.001")
    assert (all_keep.returncode, none_keep.returncode) == (0, 0), all_keep.stderr + none_keep.stderr
    (path,) = (tmp_path / "runs" / "easy").glob("launches/*/levels/*/level.json")
    stored = json.loads(path.read_text())
    assert stored["level"]["goodput"] == {"ttft_s": 60.0, "tpot_s": 60.0}
    rates = stored["throughput"]
    assert rates["goodput_requests_s"] == pytest.approx(rates["requests_s_whole"])
    assert re.search(r"ok: 6/6 \| goodput: [\d.]+ req/s$", all_keep.stdout, re.MULTILINE)
    assert re.search(r"ok: 6/6 \| goodput: 0.00 req/s$", none_keep.stdout, re.MULTILINE)
    assert "goodput req/s" in all_keep.stdout


def test_objectives_that_make_no_sense_are_named(tmp_path):
    done = bench(tmp_path, "--goodput", "ttft:fast, itl:5", "http://127.0.0.1:1", "--insecure")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 3 faults",
        "  --ca-file and --insecure are for https (`http://127.0.0.1:1` is not encrypted)",
        "  --goodput: `fast` is not a number above zero",
        "  --goodput: `itl:5` names no objective (ttft, tpot or e2e, as in ttft:500)",
    ]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://[::1", "`http://[::1` is not a URL: Invalid IPv6 URL"),
        ("127.0.0.1:port", "`127.0.0.1:port` has no valid port"),
        ("http://", "`http://` is not a URL of a server"),
    ],
)
def test_an_address_that_is_none_is_one_clear_error(tmp_path, url, said):
    done = bench(tmp_path, url)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {said}")
    assert not (tmp_path / "runs").exists()


def test_what_only_a_recipes_rules_find_is_named_without_lines_nobody_wrote_and_leaves_no_recipe(tmp_path):
    done = bench(tmp_path, "127.0.0.1:1", "--temperature", "-1", "--prompts", "nowhere")
    assert done.returncode == 2
    assert "error: `workload.temperature`: must be at least 0, got `-1.0`" in done.stderr
    assert ".yaml" not in done.stderr
    assert not list(tmp_path.rglob("*.yaml"))


def test_a_recipe_that_another_sweep_left_is_never_lost(truth, tmp_path):
    recipes = tmp_path / "runs" / "recipes"
    for tokens in (4, 4, 5):
        assert bench(tmp_path, truth.url, "-c", "1", "-n", "1", "--max-tokens", tokens).returncode == 0
    first, second = sorted(recipes.iterdir(), key=lambda path: len(path.name))
    assert (first.name, second.name) == (f"bench-127.0.0.1-{truth.port}.yaml", f"bench-127.0.0.1-{truth.port}-2.yaml")
    assert "max_tokens: 4" in first.read_text()
    assert "max_tokens: 5" in second.read_text()


def test_what_a_simulated_server_did_is_called_simulated(tmp_path):
    with serving(simulated.ENGINE, tmp_path, args={"step-ms": 1, "sequence-ms": 0.1}) as server:
        done = bench(tmp_path, f"127.0.0.1:{server.port}", "-c", "1", "-n", "2", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    row, title = done.stdout.splitlines()[:2]
    assert row.endswith("ok: 2/2 | simulated")
    assert title.strip().endswith("(simulated)")


def test_a_sweep_of_few_requests_says_what_it_cannot_tell_as_a_run_does(truth, tmp_path):
    done = bench(tmp_path, truth.url, "-c", "1", "-n", "4", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    [recipe] = (tmp_path / "runs" / "recipes").iterdir()
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", recipe], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = [
        [line for line in one.stderr.splitlines() if re.match("[a-z]+: few-requests: ", line)] for one in (done, ran)
    ]
    assert len(said[0]) == 1
    assert said[0] == said[1]


def test_a_busy_machine_is_told_before_a_sweep(truth, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "governors", dict)
    monkeypatch.setattr(facts, "usable_cpus", lambda: 2.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.4, 0.0, 0.0))
    assert main(["bench", truth.url, "-c", "1", "-n", "40", "--max-tokens", "2", "--name", "mine"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "warning: CPU: load average 3.4 on 2 CPUs before anything started (others are using this machine)"
    )
    assert main(["show", "runs/mine"]) == 0
    assert "suspect: others were using this machine: load average 3.4 on 2 CPUs" in capsys.readouterr().out


def test_a_dead_port_is_told_without_a_log_that_is_not_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    done = bench(tmp_path, url, "-c", "1", "-n", "4")
    assert done.returncode == 5
    assert f"error: could not reach the server at {url}: no answer from {url}/" in done.stderr
    assert "log" not in done.stderr
    assert "did not start" not in done.stderr


def test_a_name_that_is_taken_is_told_with_the_recipe_that_goes_on(truth, tmp_path):
    words = (truth.url, "-c", "1", "-n", "4", "--max-tokens", "2", "--name", "mine")
    assert bench(tmp_path, *words).returncode == 0
    again = bench(tmp_path, *words)
    assert again.returncode == 2
    [recipe] = (tmp_path / "runs" / "recipes").iterdir()
    words_on = f"harness run {recipe.relative_to(tmp_path)} --out runs --resume"
    assert again.stderr.endswith(f"hint: give another --name or --out, or go on with it: `{words_on}`\n")
    resumed = subprocess.run(
        [sys.executable, "-m", *words_on.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "c1: reuse" in resumed.stderr

    other = bench(tmp_path, *words, "--seed", "9")
    assert other.returncode == 2
    assert other.stderr.endswith("hint: give another --name or --out\n")
