import pytest

from q38.base.errors import InputError
from q38.ple.find import find_ple


def make(directory):
    directory.mkdir(parents=True)
    (directory / "ple.json").write_text("{}")
    return directory


def test_the_directory_that_is_given_comes_first(tmp_path):
    make(tmp_path / "model" / "ple")
    given = make(tmp_path / "elsewhere")
    assert find_ple(tmp_path / "model", given) == given


def test_the_file_itself_may_be_given(tmp_path):
    given = make(tmp_path / "elsewhere")
    assert find_ple(tmp_path / "model", given / "ple.json") == given


def test_ple_in_the_model_comes_before_ple_beside_it(tmp_path):
    inside = make(tmp_path / "model" / "ple")
    make(tmp_path / "ple")
    assert find_ple(tmp_path / "model") == inside


def test_ple_beside_the_model_is_found(tmp_path):
    beside = make(tmp_path / "ple")
    (tmp_path / "model").mkdir()
    assert find_ple(tmp_path / "model") == beside


def test_no_table_is_no_error(tmp_path):
    assert find_ple(tmp_path / "model") is None


def test_a_given_directory_without_ple_json_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no ple\.json"):
        find_ple(tmp_path / "model", tmp_path)
