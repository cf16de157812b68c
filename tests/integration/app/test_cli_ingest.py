"""``dflash-rag ingest`` by itself: what it says, and the exit status."""

import io
import json
import os
import subprocess
import sys
import time

from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen import canvas

from ingest import Home


def pdf(text: str | None, **options: object) -> bytes:
    out = io.BytesIO()
    page = canvas.Canvas(out, **options)
    if text is None:
        page.rect(100, 600, 200, 100, fill=1)
    else:
        page.drawString(72, 700, text)
    page.showPage()
    page.save()
    return out.getvalue()


def test_the_first_ingest_says_what_it_did(ingested):
    assert ingested.ingest.stdout.count("\n") == 1
    summary = json.loads(ingested.ingest.stdout)
    assert (summary["files"], summary["pages"], summary["passages"]) == (4, 12, 47)
    assert 0 < summary["embedded"] <= 47
    assert summary["failed"] == summary["warnings"] == []
    assert summary["seconds"] > 0
    assert Home(ingested.home).owner() is None


def test_a_second_ingest_embeds_nothing(installation, here):
    done = here(installation, "ingest")
    assert done.returncode == 0, done.stderr
    assert "0 files read, 4 unchanged, 0 removed" in done.stdout
    assert "0 embedded" in done.stdout


def test_files_that_cannot_be_read_are_named_with_the_reason_and_the_rest_is_ingested(
    installation, here
):
    secret = StandardEncryption("user", "owner", canPrint=0)
    for path in (installation.data / "samples").iterdir():
        path.unlink()
    bad = {
        "broken.pdf": b"%PDF-1.7\n" + b"garbage" * 50,
        "empty.pdf": b"",
        "encrypted.pdf": pdf("secret", encrypt=secret),
        "scanned.pdf": pdf(None),
        "[bold]markup %s.txt": b"\x00\x01\x02",
        "clear\x1b[2J.txt": b"\x00",
        os.fsdecode(b"not-utf8-\xff.txt"): b"\x00",
    }
    for name, data in bad.items():
        (installation.data / name).write_bytes(data)
    (installation.data / "good.txt").write_text("The violet lamp costs 77 dollars.")
    (installation.data / "loop").symlink_to(installation.data)
    done = here(installation, "ingest", "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    reasons = {failed["file"]: failed["reason"] for failed in summary["failed"]}
    assert set(reasons) == {*list(bad)[:-1], "not-utf8-\\xff.txt"}
    assert all(reasons.values())
    assert "password" in reasons["encrypted.pdf"]
    assert (summary["files"], summary["passages"], summary["removed"]) == (1, 1, 4)
    told = here(installation, "ingest")
    assert told.returncode == 1
    for name in reasons:
        shown = name.replace("\x1b", "\\x1b")  # a terminal must not obey it
        assert f"failed: {shown}: " in told.stdout.replace("\n", " ")


def test_a_folder_that_is_not_there_is_named(installation, here):
    done = here(installation, "ingest", "nowhere")
    assert done.returncode == 1
    assert "nowhere: there is no such file or folder" in done.stdout.replace("\n", " ")


def test_a_damaged_library_is_told_in_a_line_that_says_what_to_do(installation, here):
    (installation.home / "library.sqlite3").write_bytes(b"\x07" * 5000)
    for name in ("library.sqlite3-wal", "library.sqlite3-shm"):
        (installation.home / name).unlink(missing_ok=True)
    done = here(installation, "ingest")
    assert done.returncode == 3
    assert done.stderr.startswith("dflash-rag: ")
    assert done.stderr.count("\n") == 1
    assert "library.sqlite3 cannot be used" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_missing_models_are_told_with_the_command_that_fetches_them(installation, tmp_path, here):
    done = here(installation, "ingest", models=tmp_path / "none")
    assert done.returncode == 3
    assert "dflash-rag models pull all-minilm-l6-v2" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_home_that_cannot_be_made_is_told_in_a_line(installation, tmp_path, here):
    (tmp_path / "file").write_text("not a folder")
    done = here(installation, "ingest", "--home", tmp_path / "file")
    assert done.returncode == 3
    assert str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr


def test_of_two_ingests_at_once_one_is_told_who_has_the_home(installation, here):
    hold = "import sys; from ingest import Home; home = Home(sys.argv[1]); home.acquire();"
    hold += "print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(installation.home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        start = time.monotonic()
        done = here(installation, "ingest")
        took = time.monotonic() - start
        holder.stdin.close()
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert f"process {holder.pid}" in done.stderr
    assert took < 5


def test_models_are_listed_with_those_that_are_here(installation, here):
    done = here(installation, "models", "list", "--json")
    assert done.returncode == 0, done.stderr
    pulled = {model["name"]: model["pulled"] for model in json.loads(done.stdout)["models"]}
    assert pulled["smollm2-135m"]
    assert pulled["all-minilm-l6-v2"]
    assert not pulled["bge-m3"]
