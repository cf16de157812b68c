"""``dflash-rag demo --json``: the whole product at once."""

import json

import pytest
from integration.app.running import command, environment


@pytest.mark.timeout(200)
def test_the_demo_finds_every_expected_page_first(models, tmp_path, questions):
    env = environment(models=models, data=tmp_path / "not used")
    done = command("demo", "--json", env=env, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    asked = result["questions"]
    assert [answer["question"] for answer in asked] == [q["question"] for q in questions]
    assert all(answer["expected_page_first"] is True for answer in asked)
    for question, answer in zip(questions, asked, strict=True):
        first = answer["citations"][0] if answer["citations"] else {"file": None, "page": None}
        assert (first["file"], first["page"]) == (question["file"], question.get("page"))
        assert answer["answer"]
    ingest = result["ingest"]
    assert (ingest["files"], ingest["passages"], ingest["failed"]) == (4, 47, [])
    assert 0 < ingest["seconds"] < 120
    assert result["engine"]["tokens_per_second"] > 0
    assert result["engine"]["tokens_per_round"] >= 1
    assert list(tmp_path.iterdir()) == []  # it ran on a temporary home, and that is gone
