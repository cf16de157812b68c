"""An index over real files: what is found, replaced, removed, refused."""

import json
import os
import sqlite3
import threading
from itertools import pairwise

import pytest

from ingest import Embedder, EmbeddingModel, FingerprintMismatch, Home, HomeNotHeld, Index
from ingest.text import index_terms

RETURNS = "# Returns\n\nWe refund within 30 days.\n\n# Shipping\n\nParcels leave at noon.\n"


def served(index):
    """Every passage text that can be reached, by its file; checks that both indexes agree."""
    library = index._library.ids()
    assert set(index._vectors._collection.get(include=[])["ids"]) == library
    assert index.passage_count == len(library)
    texts = {}
    for passage in sorted(index.passages(sorted(library)), key=lambda p: (p.file, p.ordinal)):
        texts.setdefault(passage.file, []).append(passage.text)
    return texts


def ask(index, minilm, question, k=3):
    ids = [id for id, _ in index.dense(minilm.embed_queries([question])[0], k)]
    return [passage.text for passage in index.passages(ids)]


def test_a_question_finds_its_passage_by_meaning_and_by_word(index, minilm, data):
    (data / "shop.md").write_text(RETURNS)
    (data / "zh.txt").write_text("商品到貨七日內可申請退貨。")
    summary = index.ingest([data])
    assert (summary.files, summary.passages, summary.embedded) == (2, 3, 3)
    assert "refund" in ask(index, minilm, "Can I have my money back?")[0]
    best, score = index.lexical("如何退貨？", 5)[0]
    assert score > 0
    passage = index.passages([best])[0]
    assert (passage.file, passage.page) == ("zh.txt", None)
    assert index.document_frequency(index_terms("refunds parcels nothing")) == {
        "refund": 1,
        "parcel": 1,
        "nothing": 0,
    }
    json.dumps(summary.to_dict())


def test_cosines_fall_from_one_and_asking_for_more_than_there_is_is_fine(index, minilm, data):
    assert index.dense(minilm.embed_queries(["x"])[0], 5) == []
    (data / "shop.md").write_text(RETURNS)
    index.ingest([data])
    vector = minilm.embed_passages(["Returns\n\nWe refund within 30 days."])[0]
    cosines = [cosine for _, cosine in index.dense(vector, 1000)]
    assert len(cosines) == 2
    assert cosines[0] == pytest.approx(1, abs=1e-4)
    assert all(a >= b for a, b in pairwise(cosines))


QUESTIONS = [
    *('"', '""', "*", "a* OR", "NEAR(a b)", "terms:x", "^a -b", "(", "🙂", "", " ", "'; DROP"),
    *("a\0b", "退貨 " * 2000, "AND", "NOT NOT", "\ud800", "{a b}: c + d"),
]


def test_no_question_breaks_the_lexical_index(index, data):
    (data / "a.txt").write_text("and not near a b")
    index.ingest([data])
    for question in QUESTIONS:
        assert isinstance(index.lexical(question, 5), list)
    assert index.lexical("NEAR(a b)", 5)


def test_a_second_run_embeds_nothing_and_changes_nothing(index, data):
    (data / "shop.md").write_text(RETURNS)
    index.ingest([data])
    before = served(index)
    os.utime(data / "shop.md")
    again = index.ingest([data])
    assert (again.files, again.unchanged, again.embedded) == (0, 1, 0)
    assert served(index) == before


def test_a_changed_file_is_replaced_whole_and_only_new_text_embedded(index, data):
    (data / "shop.md").write_text(RETURNS)
    index.ingest([data])
    (data / "shop.md").write_text(RETURNS.replace("30 days", "90 days"))
    summary = index.ingest([data])
    assert (summary.files, summary.embedded) == (1, 1)
    assert served(index) == {
        "shop.md": ["Returns\n\nWe refund within 90 days.", "Shipping\n\nParcels leave at noon."]
    }
    assert [index.passages([id])[0].text for id, _ in index.lexical("30", 5)] == []


def test_a_deleted_file_no_longer_answers_and_others_do(index, minilm, data):
    (data / "sub").mkdir()
    for name in ("gone.txt", "sub/also.txt", "stays.txt"):
        (data / name).write_text(f"The secret of {name} is blue.")
    index.ingest([data])
    (data / "gone.txt").unlink()
    (data / "sub/also.txt").unlink()
    (data / "sub").rmdir()
    assert index.ingest([data]).removed == 2
    assert list(served(index)) == ["stays.txt"]
    assert ask(index, minilm, "secret of gone.txt") == ["The secret of stays.txt is blue."]


def test_only_what_lies_under_the_given_paths_is_removed(index, data):
    (data / "a").mkdir()
    (data / "a/one.txt").write_text("one")
    (data / "two.txt").write_text("two")
    index.ingest([data])
    (data / "a/one.txt").unlink()
    (data / "two.txt").unlink()
    assert index.ingest([data / "a"]).removed == 1
    assert list(served(index)) == ["two.txt"]
    assert index.ingest([data / "two.txt"]).removed == 1
    assert served(index) == {}


def test_a_missing_root_folder_removes_nothing_and_is_reported(index, data):
    (data / "usb").mkdir()
    (data / "usb/a.txt").write_text("on the stick")
    index.ingest([data / "usb"])
    (data / "usb").rename(data / "elsewhere")
    summary = index.ingest([data / "usb", data / "typo.pdf"])
    assert summary.removed == 0
    assert [failed.file for failed in summary.failed] == ["usb", "typo.pdf"]
    assert list(served(index)) == ["usb/a.txt"]


def test_a_renamed_file_moves_without_being_embedded_again(index, data):
    (data / "old.txt").write_text("The same words.")
    index.ingest([data])
    (data / "old.txt").rename(data / "new.txt")
    summary = index.ingest([data])
    assert (summary.files, summary.removed, summary.embedded) == (1, 1, 0)
    assert served(index) == {"new.txt": ["The same words."]}


def test_two_files_with_the_same_bytes_are_two_documents(index, data):
    for name in ("a.txt", "b.txt"):
        (data / name).write_text("The same words.")
    assert index.ingest([data]).embedded == 1
    assert served(index) == {"a.txt": ["The same words."], "b.txt": ["The same words."]}
    (data / "a.txt").unlink()
    index.ingest([data])
    assert served(index) == {"b.txt": ["The same words."]}
    assert index._vectors.check()


def test_what_cannot_be_read_is_listed_and_the_rest_goes_on(index, data):
    (data / "broken.pdf").write_bytes(b"garbage")
    (data / "empty.pdf").write_bytes(b"")
    (data / "good.txt").write_text("Good.")
    (data / "ignored.exe").write_bytes(b"MZ")
    for name in (".hidden.txt", "~$office.txt", ".DS_Store"):
        (data / name).write_text("no")
    summary = index.ingest([data, data / "ignored.exe"])
    reasons = {failed.file: failed.reason for failed in summary.failed}
    assert set(reasons) == {"broken.pdf", "empty.pdf", "ignored.exe"}
    assert "0 bytes" in reasons["empty.pdf"]
    assert list(served(index)) == ["good.txt"]
    states = {record.file: record.state for record in index.files()}
    assert states == {"broken.pdf": "failed", "empty.pdf": "failed", "good.txt": "ok"}


def test_a_file_that_turns_unreadable_keeps_its_earlier_version(index, data):
    (data / "a.txt").write_text("Version one.")
    index.ingest([data])
    (data / "a.txt").write_bytes(b"\0\0\0")
    for _ in range(2):
        summary = index.ingest([data])
        assert "earlier version is still served" in summary.failed[0].reason
        assert served(index) == {"a.txt": ["Version one."]}
    (data / "a.txt").write_text("Version one.")
    assert index.ingest([data]).failed == []
    assert index.files()[0].state == "ok"


def test_a_file_above_the_limit_is_refused_by_size(home, minilm, data):
    (data / "big.txt").write_text("x" * 1001)
    with Index.open(home, minilm, data, max_bytes=1000) as index:
        assert "limit" in index.ingest([data]).failed[0].reason


def test_a_file_that_grows_while_it_is_read_is_not_ingested(index, data, monkeypatch):
    import ingest.pipeline

    path = data / "log.txt"
    path.write_text("line\n")
    reads = []

    def read_and_write(name, content):
        reads.append(content)
        with path.open("a") as file:
            file.write("more\n")
        return real(name, content)

    real = ingest.pipeline.read
    monkeypatch.setattr(ingest.pipeline, "read", read_and_write)
    assert "still being written" in index.ingest([data]).failed[0].reason
    assert len(reads) == 2
    assert served(index) == {}


def test_a_full_disk_fails_the_file_and_keeps_what_was_there(index, data):
    (data / "a.txt").write_text("Before.")
    index.ingest([data])
    db = index._library._writer
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")
    (data / "a.txt").write_text("After. " * 9000)
    summary = index.ingest([data])
    assert "full" in summary.failed[0].reason
    assert served(index) == {"a.txt": ["Before."]}
    db.execute("PRAGMA max_page_count = 1000000")
    assert index.ingest([data]).files == 1
    assert "a.txt" in served(index)


def test_links_in_a_circle_are_walked_once(index, data):
    (data / "a.txt").write_text("Once.")
    (data / "loop").symlink_to(data, target_is_directory=True)
    (data / "dangling.txt").symlink_to(data / "nowhere.txt")
    assert index.ingest([data]).files == 1
    assert served(index) == {"a.txt": ["Once."]}


def test_a_file_outside_the_data_folder_is_known_by_its_whole_path(index, tmp_path):
    outside = tmp_path / "else.txt"
    outside.write_text("Outside.")
    index.ingest([outside])
    assert list(served(index)) == [outside.as_posix()]


def test_stopping_keeps_what_is_done_and_a_next_run_does_the_rest(index, data):
    for name in ("a.txt", "b.txt", "c.txt"):
        (data / name).write_text(name)
    events = []
    summary = index.ingest(
        [data], on_event=events.append, should_stop=lambda: any(e.kind == "done" for e in events)
    )
    assert summary.stopped
    assert list(served(index)) == ["a.txt"]
    assert index.ingest([data]).files == 2
    assert [event.kind for event in events] == ["found", "reading", "embedding", "done"]


def test_searches_go_on_while_files_are_ingested(index, minilm, data):
    (data / "first.md").write_text(RETURNS)
    index.ingest([data])
    (data / "big.txt").write_text("\n\n".join(f"Sentence {n} of many. " * 30 for n in range(12)))
    worker = threading.Thread(target=index.ingest, args=([data],))
    worker.start()
    rounds = 0
    while worker.is_alive():
        assert ask(index, minilm, "money back", 1)
        assert index.lexical("refund", 3)
        rounds += 1
    worker.join()
    assert rounds > 1
    assert len(served(index)["big.txt"]) > 5


def test_an_index_of_another_model_is_refused_until_it_is_rebuilt(home, minilm, data):
    (data / "shop.md").write_text(RETURNS)
    with Index.open(home, minilm, data) as index:
        index.ingest([data])
    other = Embedder(
        EmbeddingModel("other", 384, passage_prefix="passage: ", query_prefix="query: "),
        minilm.folder,
    )
    with pytest.raises(FingerprintMismatch, match="--rebuild") as caught:
        Index.open(home, other, data)
    assert len(caught.value.differences) == 3
    with Index.open(home, other, data, rebuild=True) as index:
        assert index._vectors.check()
        vector = other.embed_passages(["Returns\n\nWe refund within 30 days."])[0]
        assert index.dense(vector, 1)[0][1] == pytest.approx(1, abs=1e-4)
        assert index.ingest([data], rebuild=True).files == 1
    with Index.open(home, other, data) as index:
        assert index.ingest([data]).unchanged == 1
    # A rebuild that ends before its ingest leaves no file thought to be up to date.
    with Index.open(home, minilm, data, rebuild=True):
        pass
    with Index.open(home, minilm, data) as index:
        assert index.ingest([data]).files == 1


def test_an_index_is_not_opened_without_its_home(tmp_path, minilm, data):
    with pytest.raises(HomeNotHeld):
        Index.open(Home(tmp_path / "h"), minilm, data)


def test_a_removed_documents_words_are_not_left_in_the_library(index, data, home):
    (data / "a.txt").write_text("The codeword is zanzibar.")
    (data / "b.txt").write_text("Other.")
    index.ingest([data])
    (data / "a.txt").unlink()
    index.ingest([data])
    index.close()
    db = sqlite3.connect(home.library)
    assert db.execute("SELECT count(*) FROM passages WHERE text LIKE '%zanzibar%'").fetchone() == (
        0,
    )
    db.close()
    assert b"The codeword is zanzibar" not in home.library.read_bytes()


@pytest.mark.parametrize("there_before", [False, True])
def test_nobody_else_can_read_what_is_in_a_home_open_to_all(minilm, data, tmp_path, there_before):
    home = Home(tmp_path / "open")
    home.path.mkdir()
    home.path.chmod(0o755)
    if there_before:
        home.library.touch()
        home.library.chmod(0o644)
    (data / "a.txt").write_text("Secret.")
    with home.lock(), Index.open(home, minilm, data) as index:
        index.ingest([data])
        home.announce("http://x", "token")
        private = {home.chroma, *home.path.glob("library*"), home.path / "owner.json"}
        assert len(private) == 5
        assert [path for path in private if path.stat().st_mode & 0o077] == []
    assert home.path.stat().st_mode & 0o777 == 0o755
