"""Which files an ingest is about."""

import unicodedata
from pathlib import Path

from ingest.discover import discover, file_key


def test_nothing_is_gone_from_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    real = Path.iterdir

    def refuse(self):
        if self.name == "locked":
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "iterdir", refuse)
    found = discover([tmp_path], tmp_path, ["locked/a.txt", "gone.txt"])
    assert found.gone == ["gone.txt"]
    assert found.problems == [("locked", "the folder cannot be listed: Permission denied")]


def test_a_folder_above_the_data_folder_covers_it(tmp_path):
    (tmp_path / "data").mkdir()
    found = discover([tmp_path], tmp_path / "data", ["gone.txt", "/elsewhere/kept.txt"])
    assert found.gone == ["gone.txt"]


def test_a_key_is_the_same_however_the_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "caf\u00e9.txt"
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for path in (Path("sub") / ".." / name, tmp_path / unicodedata.normalize("NFD", name)):
        assert file_key(path, Path()) == name
    assert file_key(tmp_path / name, tmp_path / "link") == name


def test_the_home_inside_a_folder_is_not_walked(tmp_path):
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "README.md").write_text("of a model")
    (tmp_path / "mine.md").write_text("of mine")
    found = discover([tmp_path], tmp_path, [], without=tmp_path / "var")
    assert [file.key for file in found.files] == ["mine.md"]


def test_a_file_given_twice_is_ingested_once(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    found = discover([tmp_path, tmp_path / "a.txt", tmp_path], tmp_path, [])
    assert len(found.files) == 1
