import re
from pathlib import Path

from faults.matrix import CASES

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_there_are_at_least_forty_faults_and_no_two_are_the_same() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({(case.breaks, str(case.changes), case.real) for case in CASES}) == len(CASES)


def test_the_document_lists_every_fault_with_the_exit_code_that_is_tested() -> None:
    listed = re.findall(r"^\| ([\w-]+) \| .* \| (\d+) \| [^|]* \| [^|]* \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert listed == [(case.name, str(case.exit)) for case in CASES]
