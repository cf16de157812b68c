"""The home's lock within one process."""

import threading

import pytest

from ingest import Home, HomeLocked, HomeNotHeld


def test_asking_about_a_home_that_is_not_there_makes_none(tmp_path):
    assert Home(tmp_path / "none").owner() is None
    assert not (tmp_path / "none").exists()


def test_a_stale_owner_file_is_no_owner(tmp_path):
    (tmp_path / "owner.json").write_text('{"pid": 1, "url": "http://old"}')
    assert Home(tmp_path).owner() is None


def test_two_homes_of_one_process_exclude_each_other_too(tmp_path):
    with Home(tmp_path).lock(), pytest.raises(HomeLocked):
        Home(tmp_path).acquire()
    with Home(tmp_path).lock():
        pass


def test_a_lock_taken_in_one_thread_is_held_in_all(tmp_path):
    home = Home(tmp_path)
    with home.lock(url="http://here"):
        seen = []
        thread = threading.Thread(target=lambda: seen.append((home.held, home.owner().url)))
        thread.start()
        thread.join()
    assert seen == [(True, "http://here")]
    assert not home.held


def test_only_the_owner_can_say_where_it_listens(tmp_path):
    with pytest.raises(HomeNotHeld):
        Home(tmp_path).announce("http://x")
