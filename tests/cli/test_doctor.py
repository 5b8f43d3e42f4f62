"""`harness doctor` as a whole command."""

import shutil

import pytest
from cli.conftest import Workplace


def test_doctor_tells_the_machine_in_one_screen(workplace: Workplace) -> None:
    spec = 'env: bare\npython: ">=3.11"\npackages: [six]\n'
    (workplace.root / "envspecs" / "bare.yaml").write_text(spec)
    done = workplace.harness("doctor")
    assert done.code in {0, 1}
    heads = [line.split()[0] for line in done.out.splitlines() if line.strip()]
    known = ("system", "cpu", "memory", "iommu", "cuda", "limits", "disk", "tools", "env")
    assert [name for name in known if name not in heads] == []
    assert "env       bare  cannot be built here: no lock: " in done.out
    assert len(done.out.splitlines()) < 40


def test_doctor_in_json_holds_what_the_screen_tells(workplace: Workplace) -> None:
    told = workplace.harness("doctor", "--json").json
    assert set(told) == {"facts", "host", "environments", "tools", "troubles"}
    assert set(told["host"]) == {"toolkits", "topology", "iommu", "governors", "limits", "disk"}
    assert told["host"]["limits"]["open_files"][1] != 0
    folder = str(workplace.root / ".harness")
    [disk] = [one for one in told["host"]["disk"] if folder in one["folders"]]
    assert disk["free"] == pytest.approx(shutil.disk_usage(workplace.root).free, rel=0.05)


@pytest.mark.parametrize(
    ("option", "value", "limits"),
    [
        ("--port", "99999", "1 to 65535"),
        ("--port", "0", "1 to 65535"),
        ("--port", "http", "1 to 65535"),
        ("--gpus", "-1", "0 to 1024"),
        ("--concurrency", "0", "1 to 1000000"),
    ],
)
def test_a_number_out_of_range_is_an_input_error(workplace: Workplace, option: str, value: str, limits: str) -> None:
    done = workplace.harness("doctor", f"{option}={value}")
    assert (done.code, f"`{value}` is not a whole number from {limits}" in done.err) == (2, True)
