import pytest

from q38.inspection.findings import CODES, Severity, codes_table
from q38.inspection.report import inspect
from tests.inspection.broken import clone
from tests.inspection.faults import FAULTS

ON_THE_HUB = {"values-unread"}  # tests/inspection/test_hub.py


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_kind_of_damage_gets_its_finding(fault, request, tmp_path):
    root = clone(request.getfixturevalue(fault.base), tmp_path / "work" / "model")
    fault.break_it(root)
    result = inspect(root, deep=fault.deep)
    found = [f for f in result.findings.kept if f.code == fault.code]
    assert found, f"only {sorted(result.findings.counts)}"
    assert all(f.what and f.remedy for f in found)
    assert result.ok == (result.findings.count(Severity.ERROR) == 0)
    if CODES[fault.code][0] is Severity.ERROR:
        assert not result.ok


def test_every_code_has_a_fault():
    assert CODES.keys() - {fault.code for fault in FAULTS} == ON_THE_HUB


def test_at_least_40_kinds_of_damage_are_tried():
    assert len(FAULTS) >= 40


def test_every_code_has_a_row_in_the_table():
    assert [row[0] for row in codes_table()] == list(CODES)


@pytest.mark.parametrize("base", ["tiny_source", "tiny_source_fp8"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_release_has_no_finding(base, deep, request):
    result = inspect(request.getfixturevalue(base), deep=deep)
    assert result.ok
    assert result.findings.kept == []


def test_a_sound_packed_checkpoint_has_no_error(tiny_packed):
    assert inspect(tiny_packed, deep=True).ok
