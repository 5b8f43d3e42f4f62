import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import FAKES, PATIENCE_S, carriers, running, until

from harness.engines.engine import Command, StopPolicy
from harness.errors import ServerError
from harness.run import gpu, logs, ports, reaper, supervise


def said(log: Path) -> list[str]:
    return [line.text for line in logs.read(log) if line.writer != logs.REAPER]


def children(log: Path) -> list[int]:
    return [int(text.split()[1]) for text in said(log) if text.startswith("child ")]


Start = Callable[..., supervise.Process]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "launch" / "server.log"


@pytest.fixture
def start(log: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[supervise.Process] = []

    def run(*words: object, **options: object) -> supervise.Process:
        command = Command((sys.executable, str(FAKES / "unruly.py"), *map(str, words)), options.pop("variables", {}))
        process = supervise.start(command, log=log, marker="run/01-a", cwd=tmp_path, **options)
        started.append(process)
        until(lambda: "ready" in said(log), "the fake to be ready")
        return process

    yield run
    for process in started:
        process.stop(StopPolicy((), 0.0), term_grace_s=0.0)


@pytest.fixture
def stranger() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    others: list[subprocess.Popen[bytes]] = []

    def run(*words: object) -> subprocess.Popen[bytes]:
        argv = [sys.executable, str(FAKES / "unruly.py"), *map(str, words)]
        other = subprocess.Popen(argv, stdout=subprocess.PIPE)
        others.append(other)
        assert other.stdout is not None
        while other.stdout.readline() != b"ready\n":
            pass
        return other

    yield run
    for other in others:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()


def test_every_line_is_stamped_and_names_the_process_that_wrote_it(start: Start, log: Path) -> None:
    process = start("--child", "--say", "hello")
    until(lambda: children(log), "the child")
    lines = list(logs.read(log))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", lines[0].at)
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    assert next(line.writer for line in lines if line.text == "hello") == str(process.pid)
    child = next(line for line in lines if line.text.startswith("child"))
    assert child.writer == child.text.split()[1] != str(process.pid)
    assert logs.plain(log).splitlines() == [line.text for line in lines if line.writer != "reaper"]


def test_a_polite_server_is_stopped_with_its_first_signal_alone(start: Start) -> None:
    process = start("--listen", port := ports.choose_port("127.0.0.1", None), listens_on=[port])
    assert process.poll() is None
    report = process.stop(StopPolicy(("SIGINT",), 20.0))
    assert [(sent.signal, sent.to) for sent in report.signals] == [("SIGINT", (process.pid,))]
    assert (report.exit_code, report.survivors, report.ports_free, report.gpu) == (0, (), True, "no GPU")
    assert report.ok
    assert report.error() is None
    assert process.stop() is report


def test_the_polite_signal_goes_to_the_server_and_not_to_its_children(start: Start, log: Path) -> None:
    process = start("--child")
    until(lambda: children(log), "the child")
    process.stop(StopPolicy(("SIGINT",), 20.0), term_grace_s=20.0)
    got = {line.writer: line.text for line in logs.read(log) if line.text.startswith("got")}
    assert got == {str(process.pid): "got SIGINT", str(children(log)[0]): "got SIGTERM"}


def test_a_child_that_double_forked_into_its_own_session_is_found_and_ended(start: Start, log: Path) -> None:
    process = start("--setsid-child")
    until(lambda: children(log), "the grandchild")
    [grandchild] = children(log)
    until(lambda: reaper.look(grandchild).parent == process._guard.pid, "the grandchild to be orphaned")
    assert os.getsid(grandchild) not in {os.getsid(process.pid), os.getsid(0)}
    assert {holder.pid for holder in process.descendants()} == {process.pid, grandchild}
    assert process.stop(term_grace_s=20.0).ok
    assert not running(grandchild)


def test_a_child_that_ignores_term_is_killed(start: Start, log: Path) -> None:
    process = start("--setsid-child", "--ignore-term")
    until(lambda: children(log), "the grandchild")
    [grandchild] = children(log)
    report = process.stop(StopPolicy(("SIGINT", "SIGTERM"), 0.3), term_grace_s=0.3)
    family = tuple(sorted((process.pid, grandchild)))
    first, again = report.signals[:4], report.signals[4:]
    assert [(sent.signal, sent.to) for sent in first] == [
        ("SIGINT", (process.pid,)),
        ("SIGTERM", (process.pid,)),
        ("SIGTERM", family),
        ("SIGKILL", family),
    ]
    assert {sent.signal for sent in again} <= {"SIGKILL"}  # whom a busy machine has not yet let die is hit once more
    assert [sent.at_s for sent in report.signals] == sorted(sent.at_s for sent in report.signals)
    assert (report.exit_code, report.ok) == (-9, True)
    assert not running(grandchild)


def test_a_child_that_wiped_its_environment_is_ended_too(start: Start, log: Path) -> None:
    process = start("--setsid-child", "--wipe-environment")
    until(lambda: children(log), "the grandchild")
    [grandchild] = children(log)
    assert reaper.mark_of(grandchild) is None
    assert process.stop(term_grace_s=20.0).ok
    assert not running(grandchild)


def test_many_children_are_all_ended(start: Start, log: Path) -> None:
    process = start("--forks", 40, "--ignore-term")
    until(lambda: len(children(log)) == 40, "forty grandchildren")
    assert process.stop(StopPolicy((), 0.0), term_grace_s=0.0).ok
    assert not [pid for pid in children(log) if running(pid)]


def test_what_a_dead_server_left_behind_is_ended_by_its_stop(start: Start, log: Path) -> None:
    process = start("--setsid-child", "--exit", 3)
    assert process.wait(PATIENCE_S) == 3
    [grandchild] = children(log)
    assert running(grandchild)
    report = process.stop(term_grace_s=20.0)
    assert (report.exit_code, [sent.to for sent in report.signals]) == (3, [(grandchild,)])
    assert not running(grandchild)


def test_a_crash_is_seen_as_its_signal(start: Start) -> None:
    assert start("--crash", "SIGSEGV").wait(PATIENCE_S) == -signal.SIGSEGV


def test_a_worker_that_crashed_unnoticed_is_seen(start: Start, log: Path) -> None:
    process = start("--crash-child", "SIGABRT")
    until(process.crashed_children, "the child to crash")
    [seen] = process.crashed_children()
    assert re.fullmatch(rf"pid \d+ ended by SIGABRT, unnoticed by pid {process.pid}", seen)
    assert process.poll() is None


def test_a_helper_that_ended_well_is_no_crash(start: Start, log: Path) -> None:
    process = start("--child", "--lives", 0.2, "--after", 60)
    until(lambda: any(not seen.alive for seen in reaper.scan().values() if seen.parent == process.pid), "the helper")
    assert process.crashed_children() == []


def test_what_cannot_be_executed_is_an_error_that_names_it(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        supervise.start(Command(("/no/such/server", "--api-key", "k")), log=log, marker="run/01-a", cwd=tmp_path)
    assert str(caught.value) == (
        "the server could not be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/server'\n"
        "  /no/such/server --api-key '[redacted]'"
    )


def test_secrets_are_in_the_server_and_in_no_log(start: Start, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ACCESS", "open sesame")
    process = start(
        "--say", "I was given open sesame and tok-123", variables={"HF_TOKEN": "tok-123"}, secrets=["MY_ACCESS"]
    )
    assert psutil.Process(process.pid).environ()["MY_ACCESS"] == "open sesame"
    assert "I was given [MY_ACCESS] and [HF_TOKEN]" in said(log)
    assert "sesame" not in log.read_text()


def test_tuning_variables_of_our_shell_do_not_reach_the_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    environment = psutil.Process(start(variables={"OMP_NUM_THREADS": "8"}).pid).environ()
    assert "NCCL_P2P_DISABLE" not in environment
    assert environment["OMP_NUM_THREADS"] == "8"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_log_that_cannot_be_written_costs_lines_and_not_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.symlink_to("/dev/full")
    words = (sys.executable, str(FAKES / "unruly.py"), "--say", "lost", "--exit", "0")
    with supervise.start(Command(words), log=log, marker="run/01-a", cwd=tmp_path) as process:
        assert process.wait(PATIENCE_S) == 0
    assert process.report is not None
    assert process.report.ok
    assert process.report.lost_lines >= 3  # our note, `lost`, `ready`


def test_a_stranger_on_the_port_is_neither_touched_nor_our_fault(
    start: Start, stranger: Callable[..., subprocess.Popen[bytes]]
) -> None:
    port = ports.choose_port("127.0.0.1", None)
    squatter = stranger("--listen", port)
    report = start(listens_on=[port]).stop(verify_s=1.0)
    assert report.ok
    assert squatter.poll() is None
    assert [holder.pid for holder in ports.holders(port)] == [squatter.pid]


def test_gpu_memory_that_does_not_come_back_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu.Gpu(0, "Fake", "GPU-0", (12, 0), 96 << 30, 1 << 30, ())
    monkeypatch.setattr(gpu, "gpus", lambda: (device,))
    process = start()
    monkeypatch.setattr(gpu, "gpus", lambda: (replace(device, memory_used=5 << 30, users=((1, 4 << 30),)),))
    report = process.stop(verify_s=0.5)
    assert not report.ok
    assert report.problems()[0].startswith("GPU memory not back: GPU 0 has 4096 MiB more in use (pid 1 (")
    assert report.error().exit_code == 5


def test_gpu_memory_within_the_margin_is_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu.Gpu(0, "Fake", "GPU-0", (12, 0), 96 << 30, 1 << 30, ())
    monkeypatch.setattr(gpu, "gpus", lambda: (device,))
    process = start()
    monkeypatch.setattr(gpu, "gpus", lambda: (replace(device, memory_used=(1 << 30) + (100 << 20)),))
    assert process.stop().gpu == "back"


def test_a_jit_lock_left_by_a_killed_build_is_removed_and_a_held_one_stays(
    start: Start, stranger: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    cache = tmp_path / "extensions"
    ours, theirs = cache / "py312" / "ours" / "lock", cache / "py312" / "theirs" / "lock"
    process = start("--lock", ours, "--ignore-term", variables={"TORCH_EXTENSIONS_DIR": str(cache)})
    stranger("--lock", theirs)
    report = process.stop(StopPolicy((), 0.0), term_grace_s=0.0)
    assert report.locks == (str(ours),)
    assert (ours.exists(), theirs.exists()) == (False, True)


def test_an_interrupt_while_stopping_kills_at_once_and_still_verifies(start: Start, log: Path) -> None:
    process = start("--setsid-child", "--ignore-term")
    until(lambda: children(log), "the grandchild")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.stop(StopPolicy(("SIGINT",), 600.0))
    timer.join()
    assert process.report is not None
    assert process.report.ok
    assert not running(children(log)[0])


def test_a_server_dies_with_its_reaper_and_stop_finds_the_rest(start: Start, log: Path) -> None:
    process = start("--setsid-child", "--ignore-term")
    until(lambda: children(log), "the grandchild")
    os.kill(process._guard.pid, signal.SIGKILL)
    until(lambda: not running(process.pid), "the kernel to end the server")
    assert process.poll() == -9
    assert running(children(log)[0])
    assert process.stop().ok
    assert not running(children(log)[0])


@pytest.fixture
def killed(log: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], list[int]]]]:
    """A harness in a process of its own, to be killed: (it, [reaper, server, everyone ...])."""
    harnesses: list[subprocess.Popen[bytes]] = []

    def run(*words: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        argv = [sys.executable, str(FAKES / "killed_harness.py"), str(log), *words]
        harness = subprocess.Popen(argv, stdout=subprocess.PIPE)
        harnesses.append(harness)
        assert harness.stdout is not None
        return harness, [int(word) for word in harness.stdout.readline().split()]

    yield run
    for harness in harnesses:
        harness.kill()
        harness.wait()
        assert harness.stdout is not None
        harness.stdout.close()
    supervise.end([seen for left in supervise.leftovers() if "killed/" in left.mark for seen in left.identities])


def test_when_the_harness_is_killed_everything_it_started_goes(log: Path, killed: Callable[..., tuple]) -> None:
    harness, (guard, server, *everyone) = killed("--setsid-child", "--child")
    assert len(everyone) == 3
    harness.kill()
    until(lambda: not any(map(running, [guard, server, *everyone])), "all to be gone")
    assert "the harness is gone; ending the server" in [line.text for line in logs.read(log)]


def test_when_the_harness_is_killed_what_ignores_term_goes_too(killed: Callable[..., tuple]) -> None:
    harness, (guard, server, *everyone) = killed("--setsid-child", "--ignore-term")
    harness.kill()
    until(lambda: not any(map(running, [guard, server, *everyone])), "all to be gone")


@pytest.mark.parametrize("wipe", [[], ["--wipe-environment"]], ids=["marked", "wiped"])
def test_when_harness_and_reaper_are_killed_the_rest_is_found_and_ended(
    killed: Callable[..., tuple], start: Start, wipe: list[str]
) -> None:
    living = start()
    harness, (guard, server, *everyone) = killed("--setsid-child", "--ignore-term", *wipe)
    [grandchild] = [pid for pid in everyone if pid != server]
    mark = reaper.mark_of(guard)
    assert mark is not None
    until(lambda: grandchild in [pid for pid, _ in supervise.roster_of(mark)["members"]], "the roster to list it")
    os.kill(harness.pid, signal.SIGSTOP)  # so that it cannot help
    os.kill(guard, signal.SIGKILL)
    harness.kill()
    harness.wait()
    until(lambda: not running(server), "the kernel to end the server")
    [left] = [left for left in supervise.leftovers() if left.launch == "killed/01-a"]
    assert [member.pid for member in left.members] == [grandchild]
    assert supervise.end(left.identities, term_grace_s=0.2) == []
    assert not running(grandchild)
    assert living.poll() is None
    assert not [left for left in supervise.leftovers() if left.launch in {"killed/01-a", "run/01-a"}]


def test_what_a_living_harness_runs_is_no_leftover(killed: Callable[..., tuple]) -> None:
    killed("--setsid-child")
    assert not [left for left in supervise.leftovers() if left.launch == "killed/01-a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_a_server_in_a_container_is_no_leftover_out_here() -> None:
    """Its mark names its harness by the pid it has in there, which out here is somebody else's, or nobody's."""
    mark = "inside/01-a@1.1.abc"
    words = ["unshare", "--pid", "--fork", "--kill-child", "env", f"{reaper.MARK}={mark}", "sleep", "60"]
    container = subprocess.Popen(words)
    try:
        until(lambda: carriers("inside/01-a"), "the server")
        assert not [left for left in supervise.leftovers() if left.mark == mark]
    finally:
        container.kill()
        container.wait()


def test_a_reused_pid_is_left_alone(stranger: Callable[..., subprocess.Popen[bytes]]) -> None:
    other = stranger()
    seen = reaper.look(other.pid)
    assert seen is not None
    supervise.end([replace(seen, start=seen.start - 1)], term_grace_s=0.1)
    assert other.poll() is None


def test_a_port_in_time_wait_is_free_and_one_that_is_listened_on_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
        assert [holder.pid for holder in ports.holders(port)] == [os.getpid()]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            client.recv(1)
    waiting = [c for c in psutil.net_connections("tcp") if c.status == "TIME_WAIT" and c.laddr.port == port]
    assert waiting
    assert ports.is_free("127.0.0.1", port)


def test_a_chosen_port_lies_where_no_client_gets_one() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= ports.choose_port("127.0.0.1", None) < first


def test_a_wanted_port_that_is_taken_is_refused_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Exception, match=rf"port {port} on 127.0.0.1 is taken\n  pid {os.getpid()} \("):
            ports.choose_port("127.0.0.1", port)
